/* NVML, as far as torch and ptdbench use it. Its header is in no wheel: the signatures are from NVIDIA's reference.
 *
 * Power, clocks and temperatures are those of an idle device of the model: placeholders, not figures to report.
 */
#include "virtual.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6 }; /* nvmlReturn_t */

typedef struct nvml_device *nvml_device; /* the index in the machine plus 1 */

static int place(nvml_device handle) { return (int)(intptr_t)handle - 1; }
static nvml_device handle_of(int place) { return (nvml_device)(intptr_t)(place + 1); }

API int nvmlInit_v2(void) { return SUCCESS; }
API int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
API int nvmlShutdown(void) { return SUCCESS; }
API const char *nvmlErrorString(int error) {
    return error == 3 ? "Not Supported" : error ? "virtual NVML: error" : "The operation was successful";
}

API int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    snprintf(version, size, "virtual");
    return SUCCESS;
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = CUDART_VERSION, SUCCESS; }

/* ---- devices and their names ---- */

API int nvmlDeviceGetCount_v2(unsigned *count) { return *count = machine_count(), SUCCESS; }

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvml_device *handle) {
    *handle = handle_of(index);
    return index < (unsigned)machine_count() ? SUCCESS : INVALID_ARGUMENT;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvml_device *handle) {
    unsigned domain, bus;
    if (sscanf(id, "%x:%x", &domain, &bus) != 2 || bus < 1 || bus > (unsigned)machine_count()) return NOT_FOUND;
    *handle = handle_of(bus - 1);
    return SUCCESS;
}

/* As in cudaGetDeviceProperties: 15 bytes of 0x11, then the index. */
static void write_uuid(char *text, size_t size, int index) {
    snprintf(text, size, "GPU-11111111-1111-1111-1111-1111111111%02x", index);
}

API int nvmlDeviceGetUUID(nvml_device handle, char *text, unsigned size) {
    write_uuid(text, size, place(handle));
    return SUCCESS;
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, nvml_device *handle) {
    char text[64];
    for (int i = 0; i < machine_count(); i++) {
        write_uuid(text, sizeof text, i);
        if (strcmp(uuid, text)) continue;
        *handle = handle_of(i);
        return SUCCESS;
    }
    return NOT_FOUND;
}

API int nvmlDeviceGetName(nvml_device handle, char *name, unsigned size) {
    snprintf(name, size, "%s", device()->name);
    return SUCCESS;
}

API int nvmlDeviceGetIndex(nvml_device handle, unsigned *index) { return *index = place(handle), SUCCESS; }

struct pci { /* nvmlPciInfo_t */
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};

API int nvmlDeviceGetPciInfo_v3(nvml_device handle, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = place(handle) + 1;
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:%02X:00.0", pci->bus);
    return SUCCESS;
}

/* ---- current state: idle ---- */

static unsigned milliwatts(void) { return device()->power * 1e3; }

API int nvmlDeviceGetEnforcedPowerLimit(nvml_device handle, unsigned *limit) { return *limit = milliwatts(), SUCCESS; }
API int nvmlDeviceGetPowerManagementDefaultLimit(nvml_device handle, unsigned *limit) {
    return *limit = milliwatts(), SUCCESS;
}
API int nvmlDeviceGetPowerUsage(nvml_device handle, unsigned *power) { return *power = milliwatts() / 10, SUCCESS; }

API int nvmlDeviceGetTotalEnergyConsumption(nvml_device handle, unsigned long long *millijoules) {
    *millijoules = now() / 1e9 * milliwatts() / 10;
    return SUCCESS;
}

enum { MEMORY_CLOCK = 2 }; /* nvmlClockType_t; all others are processor clocks */

API int nvmlDeviceGetClockInfo(nvml_device handle, int which, unsigned *megahertz) {
    *megahertz = (which == MEMORY_CLOCK ? device()->memory_clock : device()->clock) / 1e6;
    return SUCCESS;
}

API int nvmlDeviceGetTemperature(nvml_device handle, int sensor, unsigned *celsius) { return *celsius = 30, SUCCESS; }

enum { GPU_IDLE = 1 }; /* nvmlClocksEventReasonGpuIdle */

API int nvmlDeviceGetCurrentClocksEventReasons(nvml_device handle, unsigned long long *reasons) {
    return *reasons = GPU_IDLE, SUCCESS;
}

/* The reference time in microseconds, and the nanoseconds for which a limit has held clocks back. */
API int nvmlDeviceGetViolationStatus(nvml_device handle, int policy, unsigned long long *status) {
    status[0] = now() / 1e3, status[1] = 0;
    return SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(nvml_device handle, unsigned *percent) {
    percent[0] = percent[1] = 0;
    return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(nvml_device handle, unsigned *count, void *processes) {
    *count = 0; /* allocations of other processes are not visible */
    return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses(nvml_device handle, unsigned *count, void *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, processes);
}

struct memory { /* nvmlMemory_t */
    unsigned long long total, available, used;
};

API int nvmlDeviceGetMemoryInfo(nvml_device handle, struct memory *m) {
    *m = (struct memory){device()->memory, device()->memory - device()->context, device()->context};
    return SUCCESS;
}

/* ---- links between devices: all to all, through NVLink switches if the model has NVLink ---- */

enum { NVLINKS = 18, TOPOLOGY_SYSTEM = 50, NOT_SUPPORTED = 3 };

API int nvmlDeviceGetNvLinkState(nvml_device handle, unsigned link, int *active) {
    *active = device()->link > 0;
    return link < NVLINKS ? SUCCESS : INVALID_ARGUMENT;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvml_device handle, unsigned link, struct pci *pci) {
    if (!device()->link) return NOT_SUPPORTED;
    memset(pci, 0, sizeof *pci);
    snprintf(pci->id, sizeof pci->id, "00000008:00:00.0");
    return SUCCESS;
}

API int nvmlDeviceGetP2PStatus(nvml_device from, nvml_device to, int which, int *status) {
    return *status = 0 /* NVML_P2P_STATUS_OK */, SUCCESS;
}

API int nvmlDeviceGetTopologyCommonAncestor(nvml_device from, nvml_device to, int *level) {
    return *level = TOPOLOGY_SYSTEM, SUCCESS;
}

API int nvmlDeviceGetCpuAffinity(nvml_device handle, unsigned words, unsigned long *cores) {
    memset(cores, 0xff, words * sizeof *cores);
    return SUCCESS;
}

struct fabric { /* nvmlGpuFabricInfoV_t, the part common to its versions */
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state; /* 0: not supported */
};

/* No fabric spans machines; torch checks when it maps memory of peers. */
API int nvmlDeviceGetGpuFabricInfoV(nvml_device handle, struct fabric *fabric) {
    memset(fabric->cluster, 0, sizeof fabric->cluster);
    fabric->status = NOT_SUPPORTED, fabric->clique = 0, fabric->state = 0;
    return SUCCESS;
}
