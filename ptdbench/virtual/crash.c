/* A crash inside of this library is a fault of ptdbench, and says so: a stack of C functions tells a user nothing. */
#include "virtual.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

enum { MOST_FRAMES = 64, OF_HANDLER = 2 /* this handler, and the kernel's call of it */ };
static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
static struct sigaction before[NSIG];

/* Whether a function of this library was at work; the name of the outermost, which the program called. */
static bool is_ours(const char **called) {
    void *frames[MOST_FRAMES];
    Dl_info here, of_frame;
    bool ours = false;
    dladdr((void *)is_ours, &here);
    for (int i = OF_HANDLER + 1, count = backtrace(frames, MOST_FRAMES); i < count; i++)
        if (dladdr(frames[i], &of_frame) && of_frame.dli_fbase == here.dli_fbase) {
            ours = true;
            if (of_frame.dli_sname) *called = of_frame.dli_sname;
        }
    return ours;
}

static void crashed(int number, siginfo_t *info, void *context) {
    sigaction(number, &before[number], NULL); /* returning repeats the fault, which has its usual effect */
    const char *called = "a thread of it";
    if (is_ours(&called)) {
        char text[512];
        int length = snprintf(
            text, sizeof text,
            "virtual GPU: ptdbench's library crashed in %s (%s): a fault of ptdbench, and none of this program; please "
            "report it with this program and what PYTHONFAULTHANDLER=1 adds\n", called, strsignal(number));
        if (write(2, text, (size_t)length) < 0) return;
    }
    if (info->si_code <= 0) raise(number); /* it was sent, and does not repeat itself */
}

/* From now on; watch.py calls it once in a process that uses a GPU. */
API void ptdbench_virtual_note_crashes(void) {
    void *frame;
    backtrace(&frame, 1); /* loads what it needs now: a handler must not */
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], &(struct sigaction){.sa_sigaction = crashed, .sa_flags = SA_SIGINFO}, &before[signals[i]]);
}
