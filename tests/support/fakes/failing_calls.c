/* System calls that fail: preloaded (LD_PRELOAD) into real processes.
 *
 * $FAILING_CALLS names a file with the order below, which a test maps into its memory: after `skip` calls of this
 * name, the next `left` fail with `error`, in the process `pid`, or in every process of the role if `pid` is 0. `hits` counts them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

struct order {
    volatile int skip, left, error, pid, hits;
    char role, call[31];
};

static struct order *order;
static char role;
extern long syscall(long number, ...);

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("FAILING_CALLS");
    long fd = path == NULL ? -1 : syscall(SYS_openat, -100, path, 2 | 02000000);
    long map = fd < 0 ? -1 : syscall(SYS_mmap, 0, sizeof *order, 3, 1, fd, 0);

    role = getenv("_MINER_GUARD_HELPER") ? 'h' : getenv("_MINER_GUARD_KEEPER_FD") ? 'g' : getenv("_MINER_GUARD_RUN") ? 'm' : 'k';
    if (fd >= 0)
        syscall(SYS_close, fd);
    order = map == -1 ? NULL : (struct order *)map;
}

static int fails(const char *call)
{
    if (order == NULL || order->left <= 0 || strcmp(order->call, call) != 0)
        return 0;
    if (order->pid != 0 ? order->pid != syscall(SYS_getpid) : order->role != role)
        return 0;
    if (__sync_fetch_and_sub(&order->skip, 1) > 0 || __sync_fetch_and_sub(&order->left, 1) <= 0)
        return 0;
    __sync_fetch_and_add(&order->hits, 1);
    errno = order->error;
    return 1;
}

/* Registers hold integers and pointers alike, so one signature fits all. `number` is the value of a failure. */
#define CALL(symbol, call, number)                                                                                   \
    long symbol(long a, long b, long c, long d, long e, long f)                                                      \
    {                                                                                                                \
        static long (*real)(long, long, long, long, long, long);                                                     \
        if (real == NULL)                                                                                            \
            *(void **)&real = dlsym(RTLD_NEXT, #symbol);                                                             \
        return fails(call) ? (number) : real(a, b, c, d, e, f);                                                      \
    }

CALL(open, "open", -1) CALL(open64, "open", -1) CALL(openat, "open", -1) CALL(openat64, "open", -1)
CALL(opendir, "opendir", 0) CALL(read, "read", -1) CALL(readv, "read", -1) CALL(write, "write", -1)
CALL(pwrite, "pwrite", -1) CALL(pwrite64, "pwrite", -1) CALL(ftruncate, "ftruncate", -1)
CALL(ftruncate64, "ftruncate", -1) CALL(fsync, "fsync", -1) CALL(fdatasync, "fsync", -1) CALL(rename, "rename", -1)
CALL(unlink, "unlink", -1) CALL(fork, "fork", -1) CALL(pipe2, "pipe2", -1) CALL(socketpair, "socketpair", -1)
CALL(socket, "socket", -1) CALL(accept4, "accept", -1) CALL(connect, "connect", -1) CALL(send, "send", -1)
CALL(sendmsg, "send", -1) CALL(recv, "recv", -1) CALL(recvmsg, "recv", -1) CALL(poll, "poll", -1)
CALL(epoll_wait, "epoll_wait", -1) CALL(waitpid, "waitpid", -1) CALL(kill, "kill", -1)
CALL(memfd_create, "memfd_create", -1)
