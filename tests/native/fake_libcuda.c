/*
 * The calls of CUDA's driver that p2pkv makes, done with the host's memory. A call with other
 * arguments than the driver expects, or outside of a context, is refused.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle;

enum { OK = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { DEVICE_ORDINAL = 9, PORTABLE = 1, MAPPED = 2, DISABLE_TIMING = 2, DEVICES = 2, FIRST_CONTEXT = 0x100 };

#define STREAM ((handle)7)
#define IN_CONTEXT                                                                                 \
    if (pushed == 0)                                                                               \
    return INVALID_CONTEXT

static int pushed, events;
static size_t registered;

/* What was begun and not ended. */
int left(void) { return pushed + events + (int)registered; }

int cuInit(unsigned flags) { return flags == 0 ? OK : INVALID_VALUE; }

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < DEVICES ? OK : INVALID_DEVICE;
}

int cuDevicePrimaryCtxRetain(handle *context, int device) {
    *context = (handle)(intptr_t)(FIRST_CONTEXT + device);
    return OK;
}

int cuCtxPushCurrent_v2(handle context) {
    pushed++;
    return (intptr_t)context >= FIRST_CONTEXT ? OK : INVALID_CONTEXT;
}

int cuCtxPopCurrent_v2(handle *context) {
    *context = NULL;
    pushed--;
    return OK;
}

int cuPointerGetAttribute(int *value, int attribute, uint64_t address) {
    *value = (int)(address >> 60);
    return attribute == DEVICE_ORDINAL ? OK : INVALID_VALUE;
}

int cuMemHostAlloc(handle *place, size_t size, unsigned flags) {
    IN_CONTEXT;
    *place = malloc(size);
    return flags == PORTABLE ? OK : INVALID_VALUE;
}

int cuMemFreeHost(handle place) {
    IN_CONTEXT;
    free(place);
    return OK;
}

int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, handle stream) {
    IN_CONTEXT;
    if (stream != STREAM)
        return INVALID_HANDLE;
    memcpy(target, (void *)(uintptr_t)source, size);
    return OK;
}

int cuMemcpyHtoDAsync_v2(uint64_t target, void *source, size_t size, handle stream) {
    IN_CONTEXT;
    if (stream != STREAM)
        return INVALID_HANDLE;
    memcpy((void *)(uintptr_t)target, source, size);
    return OK;
}

int cuEventCreate(handle *event, unsigned flags) {
    IN_CONTEXT;
    events++;
    *event = &events;
    return flags == DISABLE_TIMING ? OK : INVALID_VALUE;
}

int cuEventRecord(handle event, handle stream) {
    IN_CONTEXT;
    return event == &events && stream == STREAM ? OK : INVALID_HANDLE;
}

int cuEventSynchronize(handle event) {
    IN_CONTEXT;
    return event == &events ? OK : INVALID_HANDLE;
}

int cuEventDestroy_v2(handle event) {
    events--;
    return event == &events ? OK : INVALID_HANDLE;
}

int cuMemHostRegister_v2(void *place, size_t size, unsigned flags) {
    IN_CONTEXT;
    registered = size;
    return place != NULL && flags == (PORTABLE | MAPPED) ? OK : INVALID_VALUE;
}

int cuMemHostUnregister(void *place) {
    IN_CONTEXT;
    registered = 0;
    return place != NULL ? OK : INVALID_VALUE;
}

int cuGetErrorString(int error, const char **text) {
    *text = error == INVALID_HANDLE ? "invalid handle" : NULL;
    return OK;
}
