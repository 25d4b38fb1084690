// Faults of a disk and of a system, loaded into a server under test (tests/server/faults.rs). Calls that touch files below one folder,
// that start threads or accept clients are steps; from one step to another the call fails, kills the process, or takes its time.
// What to do lies in a file that the test writes and this library has mapped.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { CREATE = 1, WRITE = 2, SYNC = 4, REMOVE = 8, OPEN = 16, THREAD = 32, ACCEPT = 64 };
enum { FAIL = 1, KILL = 2, DELAY = 3 };

static struct {
    _Atomic uint64_t steps, from, to, kinds, action, value;
} *control;
static const char *folder;

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void setup(void) {
    const char *path = getenv("FAULTS_CONTROL");
    folder = getenv("FAULTS_FOLDER");
    int file = path && folder ? NEXT(open)(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *map = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (map != MAP_FAILED) control = map;
}

// Whether the call is to fail, with errno set.
static int step(int kind) {
    if (!control || !(control->kinds & kind)) return 0;
    uint64_t n = ++control->steps;
    if (n < control->from || n > control->to) return 0;
    if (control->action == KILL) {
        kill(getpid(), SIGKILL);
        pause();
    }
    if (control->action == DELAY) {
        struct timespec time = {control->value / 1000, control->value % 1000 * 1000000};
        nanosleep(&time, NULL);
        return 0;
    }
    errno = (int)control->value;
    return control->action == FAIL;
}

static int inside(const char *path) { return folder && !strncmp(path, folder, strlen(folder)); }

static int on_disk(int file) {
    if (!control || !control->kinds) return 0;
    char name[40], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return inside(path);
}

#define OPENER(name)                                                                            \
    int name(const char *path, int flags, ...) {                                                \
        va_list list;                                                                           \
        va_start(list, flags);                                                                  \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;                 \
        va_end(list);                                                                           \
        if (inside(path) && step(flags & O_CREAT ? CREATE : OPEN)) return -1;                   \
        return NEXT(name)(path, flags, mode);                                                   \
    }
OPENER(open)
OPENER(open64)

ssize_t write(int file, const void *bytes, size_t n) {
    if (on_disk(file) && step(WRITE)) return -1;
    return NEXT(write)(file, bytes, n);
}

ssize_t writev(int file, const struct iovec *parts, int n) {
    if (on_disk(file) && step(WRITE)) return -1;
    return NEXT(writev)(file, parts, n);
}

int fsync(int file) {
    if (on_disk(file) && step(SYNC)) return -1;
    return NEXT(fsync)(file);
}

int fdatasync(int file) {
    if (on_disk(file) && step(SYNC)) return -1;
    return NEXT(fdatasync)(file);
}

int unlink(const char *path) {
    if (inside(path) && step(REMOVE)) return -1;
    return NEXT(unlink)(path);
}

int rename(const char *from, const char *to) {
    if (inside(to) && step(CREATE)) return -1;
    return NEXT(rename)(from, to);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*work)(void *), void *argument) {
    if (step(THREAD)) return errno;
    return NEXT(pthread_create)(thread, how, work, argument);
}

int accept4(int socket, struct sockaddr *address, socklen_t *length, int flags) {
    if (step(ACCEPT)) return -1;
    return NEXT(accept4)(socket, address, length, flags);
}
