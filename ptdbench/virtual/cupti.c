/* CUPTI, as far as torch's profiler uses it: records of each call that launches work, of the work on the
 * device, and of the torch operation that made the call. Records of one piece of work share a correlation id.
 */
#include "virtual.h"

#include <cupti.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { KINDS = 256, LARGEST = 4096 }; /* activity kinds; maximum bytes of all records of one piece of work */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile bool enabled[KINDS];
static CUpti_BuffersCallbackRequestFunc request;
static CUpti_BuffersCallbackCompleteFunc completed;
static CUpti_TimestampCallbackFunc clock_of_torch;
static uint8_t *buffer; /* provided by torch, which gets all buffers back */
static size_t filled, room;

/* ---- time: torch's clock may count in other units than nanoseconds (on x86 it reads the time-stamp counter) ---- */

static uint64_t torch_now(void) { return clock_of_torch ? clock_of_torch() : (uint64_t)now(); }

/* Ticks of torch's clock per nanosecond, since the first call. */
static double ticks(void) {
    static uint64_t first;
    static double first_time;
    uint64_t here = torch_now();
    double time = now();
    if (!first) {
        first = here, first_time = time;
        usleep(2000);
        here = torch_now(), time = now();
    }
    return time - first_time > 1e6 ? (here - first) / (time - first_time) : 1;
}

/* ---- enclosing operations: torch pushes an id when an operation begins, and pops it when it ends ---- */

enum { EXTERNAL_KINDS = 8, DEPTH = 256 };
static __thread uint64_t above[EXTERNAL_KINDS][DEPTH];
static __thread int deep[EXTERNAL_KINDS];

API CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
    if ((int)kind >= EXTERNAL_KINDS) return CUPTI_ERROR_INVALID_PARAMETER;
    if (deep[kind] < DEPTH) above[kind][deep[kind]] = id;
    deep[kind]++;
    if (kind == CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0) count_operator();
    return CUPTI_SUCCESS;
}

API CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t *last) {
    if ((int)kind >= EXTERNAL_KINDS || !deep[kind]) return CUPTI_ERROR_QUEUE_EMPTY;
    deep[kind]--;
    if (last) *last = deep[kind] < DEPTH ? above[kind][deep[kind]] : 0;
    return CUPTI_SUCCESS;
}

/* ---- records ---- */

/* Appends an empty record of a kind to the buffer; the caller fills its fields. */
#define NEXT(type, name, of_kind)           \
    type *name = (type *)(buffer + filled); \
    memset(name, 0, sizeof *name);          \
    name->kind = of_kind;                   \
    filled += sizeof *name

static size_t size_of_record(const CUpti_Activity *record) {
    switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return sizeof(CUpti_ActivityKernel9);
    case CUPTI_ACTIVITY_KIND_MEMCPY: return sizeof(CUpti_ActivityMemcpy5);
    case CUPTI_ACTIVITY_KIND_MEMSET: return sizeof(CUpti_ActivityMemset4);
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return sizeof(CUpti_ActivityExternalCorrelation);
    default: return sizeof(CUpti_ActivityAPI);
    }
}

/* Sets where and when work ran on the device. */
#define PLACE(record, id, stream, from, to)                                                                \
    record->correlationId = id, record->streamId = stream_id(stream), record->deviceId = current_device(), \
    record->contextId = 1, record->start = from, record->end = to

static void write_call(uint32_t id, int callback_id, uint64_t begin, uint64_t end) {
    for (int kind = 0; kind < EXTERNAL_KINDS; kind++) {
        int top = deep[kind] < DEPTH ? deep[kind] : DEPTH;
        if (!top || !enabled[CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION]) continue;
        NEXT(CUpti_ActivityExternalCorrelation, external, CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION);
        external->externalKind = kind, external->externalId = above[kind][top - 1], external->correlationId = id;
    }
    NEXT(CUpti_ActivityAPI, call, CUPTI_ACTIVITY_KIND_RUNTIME);
    call->cbid = callback_id, call->start = begin, call->end = end, call->correlationId = id;
    call->processId = getpid(), call->threadId = syscall(SYS_gettid);
}

static void write_kernel(uint32_t id, const struct work *work, cudaStream_t stream, uint64_t begin, uint64_t end) {
    NEXT(CUpti_ActivityKernel9, kernel, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    PLACE(kernel, id, stream, begin, end);
    kernel->completed = end, kernel->name = work->name, kernel->registersPerThread = 32;
    kernel->gridX = work->grid.x, kernel->gridY = work->grid.y, kernel->gridZ = work->grid.z;
    kernel->blockX = work->block.x, kernel->blockY = work->block.y, kernel->blockZ = work->block.z;
}

static void write_copy(uint32_t id, const struct work *work, cudaStream_t stream, uint64_t begin, uint64_t end) {
    NEXT(CUpti_ActivityMemcpy5, copy, CUPTI_ACTIVITY_KIND_MEMCPY);
    PLACE(copy, id, stream, begin, end);
    bool from = work->name[0] == 'D', to = work->name[3] == 'D'; /* copies.c: HtoD, DtoH, DtoD, HtoH */
    copy->copyKind = from && to ? CUPTI_ACTIVITY_MEMCPY_KIND_DTOD
                     : to       ? CUPTI_ACTIVITY_MEMCPY_KIND_HTOD
                     : from     ? CUPTI_ACTIVITY_MEMCPY_KIND_DTOH
                                : CUPTI_ACTIVITY_MEMCPY_KIND_HTOH;
    copy->srcKind = from ? CUPTI_ACTIVITY_MEMORY_KIND_DEVICE : CUPTI_ACTIVITY_MEMORY_KIND_PINNED;
    copy->dstKind = to ? CUPTI_ACTIVITY_MEMORY_KIND_DEVICE : CUPTI_ACTIVITY_MEMORY_KIND_PINNED;
    copy->bytes = work->bytes;
}

static void write_set(uint32_t id, const struct work *work, cudaStream_t stream, uint64_t begin, uint64_t end) {
    NEXT(CUpti_ActivityMemset4, set, CUPTI_ACTIVITY_KIND_MEMSET);
    PLACE(set, id, stream, begin, end);
    set->bytes = work->bytes, set->memoryKind = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
}

/* Makes room for the records of one piece of work; the caller holds the lock. */
static bool make_room(void) {
    size_t most;
    if (buffer && filled + LARGEST > room) {
        completed(NULL, 0, buffer, room, filled);
        buffer = NULL;
    }
    if (!buffer && request) {
        filled = 0;
        request(&buffer, &room, &most);
    }
    return buffer && filled + LARGEST <= room;
}

static uint32_t last_id;

void record_work(const struct work *work, cudaStream_t stream) {
    static const int callbacks[] = {[KERNEL] = LAUNCH_KERNEL, [COPY] = MEMCPY_ASYNC, [SET] = MEMSET_ASYNC};
    /* nanoseconds of a call, and of work: guesses */
    enum { CALL = 4000, AT_ONCE = 1000 };
    if (!enabled[CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL] && !enabled[CUPTI_ACTIVITY_KIND_RUNTIME]) return;
    pthread_mutex_lock(&lock);
    double rate = ticks();
    /* torch drops records that end after profiling stopped, and the device's clock runs ahead of the host's: work is
     * recorded at the time of its call */
    uint64_t called = torch_now(), to = called + AT_ONCE * rate;
    if (make_room()) {
        uint32_t id = ++last_id;
        write_call(id, callbacks[work->kind], called, called + CALL * rate);
        if (work->kind == KERNEL) write_kernel(id, work, stream, called, to);
        if (work->kind == COPY) write_copy(id, work, stream, called, to);
        if (work->kind == SET) write_set(id, work, stream, called, to);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- calls of torch ---- */

API CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc requested,
                                               CUpti_BuffersCallbackCompleteFunc done) {
    request = requested, completed = done;
    return CUPTI_SUCCESS;
}

API CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc function) {
    return clock_of_torch = function, CUPTI_SUCCESS;
}

API CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
    if ((unsigned)kind < KINDS) enabled[kind] = true;
    return CUPTI_SUCCESS;
}

API CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
    if ((unsigned)kind < KINDS) enabled[kind] = false;
    return CUPTI_SUCCESS;
}

API CUptiResult cuptiActivityFlushAll(uint32_t flag) {
    pthread_mutex_lock(&lock);
    if (buffer) completed(NULL, 0, buffer, room, filled);
    buffer = NULL;
    pthread_mutex_unlock(&lock);
    return CUPTI_SUCCESS;
}

API CUptiResult cuptiActivityGetNextRecord(uint8_t *first, size_t bytes, CUpti_Activity **record) {
    uint8_t *next = *record ? (uint8_t *)*record + size_of_record(*record) : first;
    if (next >= first + bytes) return CUPTI_ERROR_MAX_LIMIT_REACHED;
    *record = (CUpti_Activity *)next;
    return CUPTI_SUCCESS;
}

API CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext context, uint32_t stream, size_t *count) {
    return *count = 0, CUPTI_SUCCESS;
}

API CUptiResult cuptiGetVersion(uint32_t *version) { return *version = CUPTI_API_VERSION, CUPTI_SUCCESS; }

API CUptiResult cuptiGetResultString(CUptiResult result, const char **text) {
    *text = result ? "virtual CUPTI: error" : "CUPTI_SUCCESS";
    return CUPTI_SUCCESS;
}

API CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain domain, uint32_t id, const char **name) {
    static const struct {
        uint32_t id;
        const char *name;
    } names[] = {{LAUNCH_KERNEL, "cudaLaunchKernel_v7000"},
                 {MEMCPY_ASYNC, "cudaMemcpyAsync_v3020"},
                 {MEMSET_ASYNC, "cudaMemsetAsync_v3020"}};
    *name = "cudaOther";
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].id == id) *name = names[i].name;
    return CUPTI_SUCCESS;
}
