/* NCCL: ranks of one machine exchange what is small through shared memory; what is large arrives as zeros. The host waits, not a stream. */
#include "virtual.h"
#include <sys/mman.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <errno.h>
enum { MOST = 65536, P2P = 16384, RING = 64 };
struct slot { size_t n; int type, op, what, root; char data[MOST]; };
struct member { _Atomic uint64_t posted, done; struct slot slots[2]; };
struct message { size_t n; int type; char data[P2P]; };
struct ring { _Atomic uint64_t head, tail; struct message messages[RING]; };
struct shared { _Atomic int attached; };
struct comm { int n, r, splits; volatile int aborted; uint64_t seq; char name[96]; struct shared *m; };
typedef struct { char b[128]; } uid;
static struct member *member(struct comm *c, int r) { return (struct member *)((char *)c->m + 4096) + r; }
static struct ring *ring(struct comm *c, int from, int to) { return (struct ring *)(member(c, c->n)) + from * c->n + to; }
static R wait_(struct comm *c) { if (c->aborted) return 6; usleep(100); return 0; }
static size_t size_of(int t) { return t < 2 || t > 9 ? 1 : t < 4 || t == 7 ? 4 : t == 6 || t == 9 ? 2 : 8; }
static R attach(struct comm **out, const char *name, int n, int r) {
    if (vg_ready()) return 1;
    struct comm *c = calloc(1, sizeof *c); c->n = n; c->r = r; snprintf(c->name, sizeof c->name, "%s", name); *out = c;
    vg_log("nccl init %s rank %d of %d\n", name, r, n);
    if (n == 1 || getenv("PTDBENCH_VIRTUAL_ALONE")) return 0;
    size_t size = 4096 + sizeof(struct member) * n + sizeof(struct ring) * n * n;
    int f = shm_open(name, O_RDWR | O_CREAT, 0600); if (f < 0 || ftruncate(f, size)) { perror("virtual NCCL"); return 2; }
    c->m = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, f, 0); close(f); if (c->m == MAP_FAILED) return 2;
    c->m->attached++; while (c->m->attached < n) { R e = wait_(c); if (e) return e; }
    if (r == 0) shm_unlink(name);
    return 0;
}
API R ncclGetVersion(int *v) { *v = 23007; return 0; }
API R ncclGetUniqueId(uid *u) { memset(u, 0, 128); int f = open("/dev/urandom", O_RDONLY); unsigned char b[8]; if (read(f, b, 8) != 8) return 2; close(f); sprintf(u->b, "/vgpu-"); for (int i = 0; i < 8; i++) sprintf(u->b + 6 + 2 * i, "%02x", b[i]); return 0; }
API R ncclCommInitRankConfig(struct comm **c, int n, uid u, int r, void *cf) { return attach(c, u.b, n, r); }
API R ncclCommInitRank(struct comm **c, int n, uid u, int r) { return attach(c, u.b, n, r); }
API R ncclCommInitRankScalable(struct comm **c, int n, int r, int k, uid *u, void *cf) { return attach(c, u->b, n, r); }
API R ncclCommCount(struct comm *c, int *n) { *n = c->n; return 0; }
API R ncclCommUserRank(struct comm *c, int *r) { *r = c->r; return 0; }
API R ncclCommGetAsyncError(void *c, int *e) { *e = 0; return 0; }
API R ncclCommAbort(struct comm *c) { c->aborted = 1; vg_log("nccl abort %s\n", c->name); return 0; }
API R ncclCommDestroy(struct comm *c) { vg_log("nccl destroy %s\n", c->name); return 0; }
API R ncclCommFinalize(struct comm *c) { return 0; }
API const char *ncclGetErrorString(R e) { return e ? "virtual NCCL error" : "no error"; }
API const char *ncclGetLastError(void *c) { return ""; }
API R ncclMemAlloc(void **p, size_t n) { return vg_add(p, n); }
extern R cudaFree(void *);
API R ncclMemFree(void *p) { return cudaFree(p); }

static double half(uint16_t h) { int e = h >> 10 & 31, m = h & 1023; double v = e ? (1 + m / 1024.0) * (e < 15 ? 1.0 / (1 << (15 - e)) : 1 << (e - 15)) : m / 16777216.0; return h >> 15 ? -v : v; }
static uint16_t to_half(float f) { uint32_t x; memcpy(&x, &f, 4); uint32_t s = x >> 16 & 0x8000; int e = (int)(x >> 23 & 255) - 112; if (e <= 0) return s; if (e > 30) return s | 0x7c00; return s | e << 10 | (x >> 13 & 1023); }
double vg_get(const char *p, size_t i, int t) {
    switch (t) { case 0: return ((int8_t *)p)[i]; case 1: return ((uint8_t *)p)[i]; case 2: return ((int32_t *)p)[i]; case 3: return ((uint32_t *)p)[i]; case 4: case 5: return ((int64_t *)p)[i]; case 6: return half(((uint16_t *)p)[i]); case 7: return ((float *)p)[i]; case 8: return ((double *)p)[i]; case 9: { uint32_t x = (uint32_t)((uint16_t *)p)[i] << 16; float f; memcpy(&f, &x, 4); return f; } } return 0; }
void vg_put(char *p, size_t i, int t, double v) {
    switch (t) { case 0: ((int8_t *)p)[i] = v; break; case 1: ((uint8_t *)p)[i] = v; break; case 2: ((int32_t *)p)[i] = v; break; case 3: ((uint32_t *)p)[i] = v; break; case 4: case 5: ((int64_t *)p)[i] = v; break; case 6: ((uint16_t *)p)[i] = to_half(v); break; case 7: ((float *)p)[i] = v; break; case 8: ((double *)p)[i] = v; break; case 9: { float f = v; uint32_t x; memcpy(&x, &f, 4); ((uint16_t *)p)[i] = x >> 16; } } }
enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, SEND, RECV, SPLIT };
static const char *kernels[] = {"ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AlltoAll", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"};
static const char *words[] = {"AllReduce", "Reduce", "ReduceScatter", "AllGather", "Broadcast", "AllToAll", "Send", "Recv", "Split"};
static R exchange(struct comm *c, int what, const char *s, char *d, size_t n, int t, int op, int root) {
    size_t each = n * size_of(t), total = what == REDUCE_SCATTER || what == ALL_TO_ALL ? each * c->n : each;
    if (!c->m) { if (d != s && each <= MOST) for (int i = 0; i < (what == ALL_GATHER ? c->n : 1); i++) memmove(d + i * each, s, each); return 0; }
    uint64_t q = c->seq++; struct member *me = member(c, c->r); struct slot *mine = &me->slots[q & 1]; R e;
    for (int i = 0; q >= 2 && i < c->n; i++) while (member(c, i)->done < q - 1) if ((e = wait_(c))) return e;
    mine->n = n; mine->type = t; mine->op = op; mine->what = what; mine->root = root; if (total <= MOST) memcpy(mine->data, s, total);
    me->posted = q + 1;
    for (int i = 0; i < c->n; i++) while (member(c, i)->posted < q + 1) if ((e = wait_(c))) return e;
    for (int i = 0; i < c->n; i++) {
        struct slot *o = &member(c, i)->slots[q & 1];
        if (o->what != what || o->n != n || o->type != t || o->op != op || o->root != root) fprintf(stderr, "virtual NCCL: MISMATCH in %s: rank %d calls %s n %zu type %d op %d root %d, rank %d calls %s n %zu type %d op %d root %d\n", c->name, c->r, words[what], n, t, op, root, i, words[o->what], o->n, o->type, o->op, o->root);
    }
#define FROM(i) member(c, i)->slots[q & 1].data
    if (total <= MOST) switch (what) {
        case ALL_GATHER: for (int i = 0; i < c->n; i++) memcpy(d + i * each, FROM(i), each); break;
        case BROADCAST: memcpy(d, FROM(root), each); break;
        case ALL_TO_ALL: for (int i = 0; i < c->n; i++) memcpy(d + i * each, FROM(i) + c->r * each, each); break;
        case REDUCE: if (c->r != root) break; /* fall through */
        case ALL_REDUCE: case REDUCE_SCATTER: {
            size_t at = what == REDUCE_SCATTER ? n * c->r : 0;
            for (size_t j = 0; j < n; j++) { double v = vg_get(FROM(0), at + j, t); for (int i = 1; i < c->n; i++) { double w = vg_get(FROM(i), at + j, t); v = op == 1 ? v * w : op == 2 ? (w > v ? w : v) : op == 3 ? (w < v ? w : v) : v + w; } vg_put(d, j, t, op == 4 ? v / c->n : v); }
        } break;
        case SPLIT: memcpy(d, FROM(0), 0); for (int i = 0; i < c->n; i++) memcpy(d + i * each, FROM(i), each); break;
    }
    me->done = q + 1; return 0;
}
API R ncclCommSplit(struct comm *c, int color, int key, struct comm **o, void *cf) {
    long mine[2] = {color, key}, all[2048]; int n = 0, r = 0; char name[96]; snprintf(name, 96, "%.70s-%d.%d", c->name, c->splits++, color);
    vg_log("nccl split %s color %d key %d\n", c->name, color, key); *o = 0;
    if (!c->m) { *o = calloc(1, sizeof **o); (*o)->n = c->n; (*o)->r = key; return 0; }
    R e = exchange(c, SPLIT, (char *)mine, (char *)all, 2, 4, 0, 0); if (e) return e;
    if (color < 0) return 0;
    for (int i = 0; i < c->n; i++) if (all[2 * i] == color) { n++; r += all[2 * i + 1] < key || (all[2 * i + 1] == key && i < c->r); }
    return attach(o, name, n, r);
}
struct todo { int what; char *p; size_t n; int t, peer; struct comm *c; void *s; }; static __thread struct todo todo[4096]; static __thread int todos, depth;
static R send_(struct todo *x) {
    if (!x->c->m) return 0; struct ring *g = ring(x->c, x->c->r, x->peer); R e; while (g->head - g->tail >= RING) if ((e = wait_(x->c))) return e;
    struct message *m = &g->messages[g->head % RING]; size_t b = x->n * size_of(x->t); m->n = x->n; m->type = x->t; if (b <= P2P) memcpy(m->data, x->p, b); g->head++; return 0;
}
static R recv_(struct todo *x) {
    if (!x->c->m) return 0; struct ring *g = ring(x->c, x->peer, x->c->r); R e; while (g->head == g->tail) if ((e = wait_(x->c))) return e;
    struct message *m = &g->messages[g->tail % RING]; size_t b = x->n * size_of(x->t);
    if (m->n != x->n || m->type != x->t) fprintf(stderr, "virtual NCCL: MISMATCH in %s: rank %d expects n %zu type %d from %d, which sent n %zu type %d\n", x->c->name, x->c->r, x->n, x->t, x->peer, m->n, m->type);
    else if (b <= P2P) memcpy(x->p, m->data, b);
    g->tail++; return 0;
}
API R ncclGroupStart(void) { depth++; return 0; }
API R ncclGroupEnd(void) {
    if (--depth > 0) return 0; R e = 0; int n = todos; todos = 0;
    for (int i = 0; i < n && !e; i++) if (todo[i].what == SEND) e = send_(todo + i);
    for (int i = 0; i < n && !e; i++) if (todo[i].what == RECV) e = recv_(todo + i);
    if (n) { size_t b = 0; unsigned g[3] = {2 * n, 1, 1}, k[3] = {640, 1, 1}; for (int i = 0; i < n; i++) b += todo[i].n * size_of(todo[i].t); vg_work(KERNEL, kernels[SEND], todo[0].s, 8 + b / 3e5, b, g, k); }
    return e;
}
static R one(int what, const char *s, char *d, size_t n, int t, int op, int root, struct comm *c, void *st) {
    unsigned g[3] = {16, 1, 1}, k[3] = {640, 1, 1}; size_t b = n * size_of(t) * (what == REDUCE_SCATTER || what == ALL_GATHER ? c->n : 1);
    vg_log("nccl %s n %zu type %d op %d in %s of %d stream %ld\n", words[what], n, t, op, c->name, c->n, vg_stream_id(st));
    R e = exchange(c, what, s, d, n, t, op, root); vg_work(KERNEL, kernels[what], st, 15 + b * (what == ALL_REDUCE ? 2.0 : 1.0) * (c->n - 1) / c->n / 3.6e5, b, g, k); return e;
}
API R ncclAllReduce(const void *s, void *d, size_t n, int t, int op, struct comm *c, void *st) { return one(ALL_REDUCE, s, d, n, t, op, 0, c, st); }
API R ncclReduce(const void *s, void *d, size_t n, int t, int op, int r, struct comm *c, void *st) { return one(REDUCE, s, d, n, t, op, r, c, st); }
API R ncclReduceScatter(const void *s, void *d, size_t n, int t, int op, struct comm *c, void *st) { return one(REDUCE_SCATTER, s, d, n, t, op, 0, c, st); }
API R ncclAllGather(const void *s, void *d, size_t n, int t, struct comm *c, void *st) { return one(ALL_GATHER, s, d, n, t, 0, 0, c, st); }
API R ncclBroadcast(const void *s, void *d, size_t n, int t, int r, struct comm *c, void *st) { return one(BROADCAST, s, d, n, t, 0, r, c, st); }
API R ncclBcast(void *d, size_t n, int t, int r, struct comm *c, void *st) { return one(BROADCAST, d, d, n, t, 0, r, c, st); }
API R ncclAlltoAll(const void *s, void *d, size_t n, int t, struct comm *c, void *st) { return one(ALL_TO_ALL, s, d, n, t, 0, 0, c, st); }
static R later(int what, void *p, size_t n, int t, int peer, struct comm *c, void *s) { vg_log("nccl %s n %zu type %d peer %d in %s of %d stream %ld\n", words[what], n, t, peer, c->name, c->n, vg_stream_id(s)); if (todos == 4096) return 3; todo[todos++] = (struct todo){what, p, n, t, peer, c, s}; if (depth) return 0; depth = 1; return ncclGroupEnd(); }
API R ncclSend(const void *p, size_t n, int t, int peer, struct comm *c, void *s) { return later(SEND, (void *)p, n, t, peer, c, s); }
API R ncclRecv(void *p, size_t n, int t, int peer, struct comm *c, void *s) { return later(RECV, p, n, t, peer, c, s); }
API R ncclRedOpCreatePreMulSum(int *op, void *scalar, int t, int residence, struct comm *c) { *op = 5; return 0; }
