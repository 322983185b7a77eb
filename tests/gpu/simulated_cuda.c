/* Stands for libcuda.so.1 where there is no GPU: the functions that pb_utils/_gpu.py calls, and
 * two more for tests. It is stricter than the real one, so that what works here is not luck:
 *
 * - Nobody but these functions can read or write device memory: elsewhere it is a SIGSEGV.
 * - A function needs a current context, and device memory only works in that of its own device.
 * - Work put into a stream is done when that stream is waited for, and no sooner.
 * - After a fork every function fails in the child.
 *
 * Environment: SIMULATED_CUDA_DEVICES "9.0,7.5" are the devices by their compute capability;
 * SIMULATED_CUDA_BYTES how much memory they have together; SIMULATED_CUDA_FAIL "function=status"
 * makes one function fail, or end the process with status 3 if the status is "exit";
 * SIMULATED_CUDA_LOG is a file that gets a line for every process that begins, and for every copy.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t Address;
typedef struct { int device; } Context;
typedef struct Work { Address to; void *from; size_t size; struct Work *next; } Work;
typedef struct { int device; Work *first, **end; } Stream;
typedef struct Memory { char *view, *content; size_t size, mapped; int device; struct Memory *next; } Memory;
typedef struct {
    size_t source_x, source_y; int source_type; const void *source_host; Address source_device;
    void *source_array; size_t source_pitch;
    size_t target_x, target_y; int target_type; void *target_host; Address target_device;
    void *target_array; size_t target_pitch;
    size_t width, height;
} Copy2D;

enum { OK, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
       INVALID_DEVICE = 101, INVALID_CONTEXT = 201, ILLEGAL_ADDRESS = 700 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the allocations */
static pthread_mutex_t work_lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t initialised;
static int devices, capability[16][2];
static Context contexts[16];
static Memory *memories;
static size_t used;
static __thread Context *stack[16];
static __thread int depth;

static int failing(const char *function) {
    const char *wanted = getenv("SIMULATED_CUDA_FAIL");
    size_t length = strlen(function);
    if (wanted && !strncmp(wanted, function, length) && wanted[length] == '=') {
        if (!strcmp(wanted + length + 1, "exit"))
            _exit(3);
        return atoi(wanted + length + 1);
    }
    return strcmp(function, "cuInit") && initialised != getpid() ? NOT_INITIALIZED : OK;
}
#define BEGIN() do { int status_ = failing(__func__); if (status_) return status_; } while (0)
#define BEGIN_IN_CONTEXT() BEGIN(); if (!depth) return INVALID_CONTEXT

static void note(const char *what, size_t size) {
    const char *path = getenv("SIMULATED_CUDA_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%d %s %zu\n", (int)getpid(), what, size);
        fclose(file);
    }
}

/* Where these bytes really are, if they lie in one allocation of the current device. */
static char *at(Address address, size_t size) {
    char *found = NULL;
    pthread_mutex_lock(&lock);
    for (Memory *m = memories; m; m = m->next)
        if ((char *)address >= m->view && (char *)address + size <= m->view + m->size &&
            m->device == stack[depth - 1]->device)
            found = m->content + ((char *)address - m->view);
    pthread_mutex_unlock(&lock);
    return found;
}

int cuInit(unsigned flags) {
    BEGIN();
    const char *list = getenv("SIMULATED_CUDA_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    (void)flags;
    devices = 0;
    for (; list && *list && devices < 16; devices++) {
        sscanf(list, "%d.%d", &capability[devices][0], &capability[devices][1]);
        contexts[devices].device = devices;
        list = strchr(list, ',');
        list = list ? list + 1 : NULL;
    }
    if (!devices || (visible && !*visible))
        return NO_DEVICE;
    if (initialised != getpid())
        note("begin", 0);
    initialised = getpid();
    return OK;
}

int cuDeviceGetCount(int *count) { BEGIN(); *count = devices; return OK; }

int cuDeviceGet(int *device, int number) {
    BEGIN();
    *device = number;
    return number < 0 || number >= devices ? INVALID_DEVICE : OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN();
    if (device < 0 || device >= devices || attribute < 75 || attribute > 76)
        return INVALID_VALUE;
    *value = capability[device][attribute - 75];
    return OK;
}

int cuDevicePrimaryCtxRetain(Context **context, int device) {
    BEGIN();
    if (device < 0 || device >= devices)
        return INVALID_DEVICE;
    *context = &contexts[device];
    return OK;
}

int cuCtxPushCurrent_v2(Context *context) {
    BEGIN();
    if (!context || depth == 16)
        return INVALID_CONTEXT;
    stack[depth++] = context;
    return OK;
}

int cuCtxPopCurrent_v2(Context **context) {
    BEGIN_IN_CONTEXT();
    *context = stack[--depth];
    return OK;
}

/* For tests: the device of this thread. */
int cuCtxGetDevice(int *device) {
    BEGIN_IN_CONTEXT();
    *device = stack[depth - 1]->device;
    return OK;
}

int cuStreamCreate(Stream **stream, unsigned flags) {
    BEGIN_IN_CONTEXT();
    (void)flags;
    *stream = calloc(1, sizeof **stream);
    (*stream)->device = stack[depth - 1]->device;
    (*stream)->end = &(*stream)->first;
    return OK;
}

/* For tests: work that is pending until the stream is waited for. */
int cuMemcpyHtoDAsync_v2(Address to, void *from, size_t size, Stream *stream) {
    BEGIN_IN_CONTEXT();
    if (!stream || stream->device != stack[depth - 1]->device)
        return INVALID_VALUE;
    Work *work = calloc(1, sizeof *work);
    *work = (Work){to, malloc(size), size, NULL};
    memcpy(work->from, from, size);
    pthread_mutex_lock(&work_lock);
    *stream->end = work;
    stream->end = &work->next;
    pthread_mutex_unlock(&work_lock);
    return OK;
}

int cuStreamSynchronize(Stream *stream) {
    BEGIN_IN_CONTEXT();
    if (!stream)
        return OK;
    int status = OK;
    pthread_mutex_lock(&work_lock);
    for (Work *work = stream->first, *next; work; work = next) {
        char *to = at(work->to, work->size);
        if (to)
            memcpy(to, work->from, work->size);
        else
            status = ILLEGAL_ADDRESS;
        next = work->next;
        free(work->from);
        free(work);
    }
    stream->first = NULL;
    stream->end = &stream->first;
    pthread_mutex_unlock(&work_lock);
    return status;
}

int cuMemAlloc_v2(Address *address, size_t size) {
    BEGIN_IN_CONTEXT();
    const char *limit = getenv("SIMULATED_CUDA_BYTES");
    if (!size)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (used + size > (limit ? strtoull(limit, NULL, 10) : 1ull << 30)) {
        pthread_mutex_unlock(&lock);
        return OUT_OF_MEMORY;
    }
    used += size;
    Memory *memory = calloc(1, sizeof *memory);
    memory->size = size;
    memory->mapped = (size + 4095) & ~4095ull;
    memory->device = stack[depth - 1]->device;
    memory->view = mmap(NULL, memory->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory->content = malloc(size);
    memset(memory->content, 0xEE, size);
    memory->next = memories;
    memories = memory;
    pthread_mutex_unlock(&lock);
    *address = (Address)memory->view;
    return OK;
}

int cuMemFree_v2(Address address) {
    BEGIN_IN_CONTEXT();
    int status = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (Memory **place = &memories; *place; place = &(*place)->next)
        if ((*place)->view == (char *)address) {
            Memory *memory = *place;
            *place = memory->next;
            used -= memory->size;
            munmap(memory->view, memory->mapped);
            free(memory->content);
            free(memory);
            status = OK;
            break;
        }
    pthread_mutex_unlock(&lock);
    return status;
}

int cuMemcpyDtoH_v2(void *to, Address from, size_t size) {
    BEGIN_IN_CONTEXT();
    char *source = at(from, size);
    if (!source)
        return ILLEGAL_ADDRESS;
    memcpy(to, source, size);
    note("to host", size);
    return OK;
}

int cuMemcpyHtoD_v2(Address to, const void *from, size_t size) {
    BEGIN_IN_CONTEXT();
    char *target = at(to, size);
    if (!target)
        return ILLEGAL_ADDRESS;
    memcpy(target, from, size);
    note("to device", size);
    return OK;
}

int cuMemcpyDtoD_v2(Address to, Address from, size_t size) {
    BEGIN_IN_CONTEXT();
    char *source = at(from, size), *target = at(to, size);
    if (!source || !target)
        return ILLEGAL_ADDRESS;
    memcpy(target, source, size);
    note("on device", size);
    return OK;
}

int cuMemcpy2D_v2(const Copy2D *copy) {
    BEGIN_IN_CONTEXT();
    if (copy->source_type != 2 || copy->target_type != 2 || copy->source_pitch < copy->width ||
        copy->target_pitch < copy->width)
        return INVALID_VALUE;
    for (size_t row = 0; row < copy->height; row++) {
        char *source = at(copy->source_device + row * copy->source_pitch, copy->width);
        char *target = at(copy->target_device + row * copy->target_pitch, copy->width);
        if (!source || !target)
            return ILLEGAL_ADDRESS;
        memcpy(target, source, copy->width);
    }
    note("on device", copy->width * copy->height);
    return OK;
}

int cuGetErrorName(int status, const char **name) {
    *name = status == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : status == NO_DEVICE       ? "CUDA_ERROR_NO_DEVICE"
            : status == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                        : "CUDA_ERROR_UNKNOWN";
    return OK;
}

int cuGetErrorString(int status, const char **text) {
    *text = status == OUT_OF_MEMORY     ? "out of memory"
            : status == NO_DEVICE       ? "no CUDA-capable device is detected"
            : status == ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
                                        : "unknown error";
    return OK;
}
