/* Make the files of a run slow, or make calls on them fail now and then:
 *
 *     gcc -shared -fPIC -o faulty_files.so faulty_files.c
 *     FAULTY_FILES=/path/output LD_PRELOAD=./faulty_files.so torchrun ... --output-dir /path/output
 *
 * While the file /path/output.harm exists, calls on existing or new files below /path/output take
 * two seconds longer if it contains "slow files". If it contains "EIO" or "ESTALE", every fiftieth
 * call of a process fails with that error.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int harmed(const char *path)
{
    static atomic_int calls;
    const char *output = getenv("FAULTY_FILES");
    char harm[PATH_MAX], word[8] = "";
    size_t length = output ? strlen(output) : 0;
    if (!length || strncmp(path, output, length) || path[length] != '/') return 0;
    snprintf(harm, sizeof harm, "%s.harm", output);
    int (*open_)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
    int file = open_(harm, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    if (read(file, word, sizeof word - 1) < 0) word[0] = 0;
    close(file);
    if (word[0] == 's') {
        sleep(2);
        return 0;
    }
    if (atomic_fetch_add(&calls, 1) % 50 != 49) return 0;
    errno = strcmp(word, "ESTALE") ? EIO : ESTALE;
    return 1;
}

static int harmed_file(int file)
{
    char link[32], path[PATH_MAX];
    if (file < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return harmed(path);
}

#define WRAP(result, name, types, names, test)             \
    result name types                                      \
    {                                                      \
        static result(*real) types;                        \
        if (!real) real = dlsym(RTLD_NEXT, #name);         \
        return test ? -1 : real names;                     \
    }

WRAP(ssize_t, write, (int file, const void *data, size_t size), (file, data, size),
     harmed_file(file))
WRAP(ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count),
     harmed_file(file))
WRAP(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at),
     (file, data, size, at), harmed_file(file))
WRAP(int, fsync, (int file), (file), harmed_file(file))
WRAP(int, rename, (const char *from, const char *to), (from, to), harmed(from))
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), harmed(path))

#define WRAP_OPEN(name)                                    \
    int name(const char *path, int flags, ...)             \
    {                                                      \
        static int (*real)(const char *, int, ...);        \
        va_list rest;                                      \
        if (!real) real = dlsym(RTLD_NEXT, #name);         \
        va_start(rest, flags);                             \
        mode_t mode = va_arg(rest, mode_t);                \
        va_end(rest);                                      \
        return harmed(path) ? -1 : real(path, flags, mode); \
    }

WRAP_OPEN(open)
WRAP_OPEN(open64)
