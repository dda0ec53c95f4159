/* Streams and events. To the host all work is complete at once, and takes no time: between two events pass as many ticks
 * as the process has enqueued pieces of work.
 */
#include "virtual.h"

#include <pthread.h>
#include <time.h>

struct CUstream_st {
    unsigned id;
    int priority, device;
    cudaGraph_t captured; /* what the stream does becomes part of this graph */
    struct CUstream_st *next;
};

struct CUevent_st {
    uint64_t id, time; /* time: in ticks */
    bool recorded;
    cudaGraph_t captured; /* by a stream that captured */
};

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static _Atomic uint64_t ticks; /* so far; the recording of an event is one too */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *streams;               /* all except the default ones */
static struct CUstream_st defaults[MOST_DEVICES]; /* id 7, as in NVIDIA's traces */

/* The default stream is 0, cudaStreamLegacy or cudaStreamPerThread. */
static struct CUstream_st *of(cudaStream_t stream) {
    if ((uintptr_t)stream > 2) return stream;
    struct CUstream_st *found = &defaults[current_device()];
    found->id = 7, found->device = current_device();
    return found;
}

unsigned stream_id(cudaStream_t stream) { return of(stream)->id; }

cudaGraph_t captures(cudaStream_t stream) { return of(stream)->captured; }
void set_capture(cudaStream_t stream, cudaGraph_t graph) { of(stream)->captured = graph; }

/* Whether a stream still captures a graph. */
static bool is_captured(cudaGraph_t graph) {
    bool is = false;
    pthread_mutex_lock(&lock);
    for (struct CUstream_st *at = streams; graph && at; at = at->next) is = is || at->captured == graph;
    pthread_mutex_unlock(&lock);
    for (int i = 0; graph && i < MOST_DEVICES; i++) is = is || defaults[i].captured == graph;
    return is;
}

void end_capture(cudaGraph_t graph) {
    pthread_mutex_lock(&lock);
    for (struct CUstream_st *at = streams; at; at = at->next)
        if (at->captured == graph) at->captured = NULL;
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < MOST_DEVICES; i++)
        if (defaults[i].captured == graph) defaults[i].captured = NULL;
}

void enqueue(cudaStream_t stream, const struct work *work) {
    if (captures(stream)) {
        capture(captures(stream), work);
        return;
    }
    ticks++;
    count_work(work);
    record_work(work, stream);
    log_work(work, stream_id(stream));
}

/* ---- streams ---- */

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    static unsigned ids = 7;
    cudaError_t error = ready();
    if (error) return error;
    struct CUstream_st *new = calloc(1, sizeof *new);
    new->priority = priority, new->device = current_device();
    pthread_mutex_lock(&lock);
    new->id = ++ids, new->next = streams;
    *stream = streams = new;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    struct CUstream_st **at = &streams;
    while (*at && *at != stream) at = &(*at)->next;
    if (*at) *at = stream->next;
    pthread_mutex_unlock(&lock);
    free(stream);
    return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = of(stream)->priority;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }

/* The host waits for a stream, an event or the device: nothing is left to wait for. */
static cudaError_t await(char kind, unsigned stream, uint64_t event) {
    cudaError_t error = ready();
    if (!error) log_call(kind, stream, event);
    return error;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return await('Y', stream_id(stream), 0); }
API cudaError_t cudaDeviceSynchronize(void) { return await('D', 0, 0); }

/* Host functions run when they are enqueued: earlier work has already taken effect. */
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

/* ---- events ---- */

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    cudaError_t error = ready();
    static _Atomic uint64_t ids;
    if (!error) *event = calloc(1, sizeof **event), (*event)->id = ++ids;
    return error;
}

API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->time = ++ticks, event->recorded = true, event->captured = captures(stream);
    if (!event->captured) log_call('E', stream_id(stream), event->id);
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if (event->recorded && !event->captured) log_call('W', stream_id(stream), event->id);
    if (is_captured(event->captured) && !captures(stream)) set_capture(stream, event->captured);
    return cudaSuccess;
}

API cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }

API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return await('Z', 0, event->id); }

/* A tick is 0.1 ms: where Inductor times its choices, the first of those with the fewest launches wins, anywhere. */
API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (!start->recorded || !end->recorded) return cudaErrorInvalidResourceHandle;
    *milliseconds = ((double)end->time - (double)start->time) * 0.1;
    return cudaSuccess;
}
