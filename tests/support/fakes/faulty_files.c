/* Files that fail or hang, as on a dead network folder or a sick kernel: preloaded (LD_PRELOAD) into real processes.
 *
 * $FAULTY_FILES_STATE names a text file of lines `fail PATTERN` and `hang PATTERN` (fnmatch over the whole path). What
 * opens such a path, or asks for the free space there, gets EIO, or waits until the line is gone. Changes take effect
 * at the next call, and in calls that hang.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

enum mood { WELL, FAIL, HANG };

/* By system calls alone: everything else would come back to the functions below. */
static enum mood mood_of(const char *path)
{
    char text[4096], *rest = NULL;
    const char *state = getenv("FAULTY_FILES_STATE");
    long fd, size;

    if (state == NULL || path == NULL || (fd = syscall(SYS_openat, AT_FDCWD, state, O_RDONLY | O_CLOEXEC)) < 0)
        return WELL;
    size = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    text[size > 0 ? size : 0] = '\0';
    for (char *line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest))
        if (strlen(line) > 5 && fnmatch(line + 5, path, 0) == 0)
            return strncmp(line, "hang", 4) == 0 ? HANG : FAIL;
    return WELL;
}

/* 0 if the real call may proceed. */
static int refused(const char *path)
{
    int before = errno;
    enum mood mood;

    while ((mood = mood_of(path)) == HANG)
        usleep(20000);
    errno = mood == FAIL ? EIO : before;
    return mood == FAIL;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MODE(flags, mode)                                                                                             \
    mode_t mode = 0;                                                                                                  \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                                                                          \
        va_list more;                                                                                                 \
        va_start(more, flags);                                                                                        \
        mode = va_arg(more, mode_t);                                                                                  \
        va_end(more);                                                                                                 \
    }
#define OPEN(name)                                                                                                    \
    int name(const char *path, int flags, ...)                                                                        \
    {                                                                                                                 \
        MODE(flags, mode)                                                                                             \
        return refused(path) ? -1 : REAL(name)(path, flags, mode);                                                    \
    }
#define OPENAT(name)                                                                                                  \
    int name(int folder, const char *path, int flags, ...)                                                            \
    {                                                                                                                 \
        MODE(flags, mode)                                                                                             \
        return refused(path) ? -1 : REAL(name)(folder, path, flags, mode);                                            \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int statvfs(const char *restrict path, struct statvfs *restrict answer)
{
    return refused(path) ? -1 : REAL(statvfs)(path, answer);
}

int statvfs64(const char *restrict path, struct statvfs64 *restrict answer)
{
    return refused(path) ? -1 : REAL(statvfs64)(path, answer);
}
