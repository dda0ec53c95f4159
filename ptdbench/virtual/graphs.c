/* CUDA graphs: work that is enqueued while a stream captures becomes part of a graph, and is enqueued again at each of
 * its launches. A stream that waits for an event of a capturing one captures too. What kernels compute, copies and
 * messages between ranks is done once, while they are captured. Conditional nodes are not answered.
 */
#include "virtual.h"

#include <pthread.h>

struct CUgraph_st {
    unsigned long long id;
    struct work *works; /* in the order of their capture, which is an order that their streams allow */
    size_t count, room;
    int owners; /* the graph itself and its executable copies, which share the works */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct CUgraph_st *new_graph(void) {
    static unsigned long long ids;
    struct CUgraph_st *graph = calloc(1, sizeof *graph);
    pthread_mutex_lock(&lock);
    graph->id = ++ids, graph->owners = 1;
    pthread_mutex_unlock(&lock);
    return graph;
}

static cudaError_t release(struct CUgraph_st *graph) {
    pthread_mutex_lock(&lock);
    bool last = !--graph->owners;
    pthread_mutex_unlock(&lock);
    if (!last) return cudaSuccess;
    free(graph->works);
    free(graph);
    return cudaSuccess;
}

void capture(cudaGraph_t graph, const struct work *work) {
    pthread_mutex_lock(&lock);
    if (graph->count == graph->room) {
        graph->room = graph->room ? 2 * graph->room : 256;
        graph->works = realloc(graph->works, graph->room * sizeof *work);
    }
    graph->works[graph->count++] = *work;
    pthread_mutex_unlock(&lock);
}

/* ---- capture ---- */

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (captures(stream)) return cudaErrorIllegalState;
    set_capture(stream, new_graph());
    return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = captures(stream);
    if (!*graph) return cudaErrorIllegalState;
    end_capture(*graph);
    return cudaSuccess;
}

static cudaError_t status_of(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = captures(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return status_of(stream, status);
}

API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { /* of the same values */
    return (CUresult)status_of(stream, (enum cudaStreamCaptureStatus *)status);
}

#if CUDART_VERSION >= 13000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                         const cudaGraphEdgeData **edges, size_t *count) {
#else
API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            size_t *count) {
#endif
    cudaGraph_t captured = captures(stream);
    if (id) *id = captured ? captured->id : 0;
    if (graph) *graph = captured;
    if (nodes) *nodes = NULL;
    if (count) *count = 0;
    return status_of(stream, status);
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    static __thread enum cudaStreamCaptureMode kept = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode was = kept;
    kept = *mode, *mode = was;
    return cudaSuccess;
}

/* ---- graphs ---- */

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    for (size_t i = 0; nodes && i < graph->count && i < *count; i++) nodes[i] = (cudaGraphNode_t)&graph->works[i];
    if (!nodes || *count > graph->count) *count = graph->count;
    return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    pthread_mutex_lock(&lock);
    graph->owners++;
    pthread_mutex_unlock(&lock);
    *executable = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    cudaError_t error = ready();
    struct CUgraph_st *graph = (struct CUgraph_st *)executable;
    for (size_t i = 0; !error && i < graph->count; i++) enqueue(stream, &graph->works[i]);
    return error;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return release(graph); }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return release((struct CUgraph_st *)executable); }

/* Objects whose life a graph prolongs, as torch's generators of random numbers: they live on. */
API cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy, unsigned count,
                                     unsigned flags) {
    static char only;
    *object = (cudaUserObject_t)&only;
    return cudaSuccess;
}
API cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) { return cudaSuccess; }
API cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
    return cudaSuccess;
}
