/* Loading libucp and saying which one it is. */
#include "ucx.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int load_functions(p2pkv_ucx_library *ucx, char *why, size_t why_size) {
    const char *missing = NULL;
#define F(name)                                       \
    *(void **)&ucx->name = dlsym(ucx->handle, #name); \
    if (ucx->name == NULL)                            \
        missing = #name;
    P2PKV_UCX_FUNCTIONS(F)
#undef F
    if (missing != NULL) {
        snprintf(why, why_size, "it has no %s; UCX %d.%d or later is needed", missing,
                 P2PKV_UCX_API_MAJOR, P2PKV_UCX_API_MINOR);
        return -1;
    }
    unsigned version[3];
    p2pkv_ucx_library_version(ucx, version);
    if (version[0] != P2PKV_UCX_API_MAJOR || version[1] < P2PKV_UCX_API_MINOR) {
        snprintf(why, why_size, "it is UCX %u.%u.%u; %d.%d or a later %d.x is needed", version[0],
                 version[1], version[2], P2PKV_UCX_API_MAJOR, P2PKV_UCX_API_MINOR,
                 P2PKV_UCX_API_MAJOR);
        return -1;
    }
    return 0;
}

p2pkv_ucx_library *p2pkv_ucx_library_open(const char *path, char *why, size_t why_size) {
    p2pkv_ucx_library *ucx = calloc(1, sizeof *ucx);
    if (ucx == NULL) {
        snprintf(why, why_size, "out of memory");
        return NULL;
    }
    if (path == NULL)
        ucx->handle = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    else
        ucx->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (ucx->handle == NULL) {
        const char *error = dlerror();
        snprintf(why, why_size, "%s", error != NULL ? error : "not loaded");
    } else if (load_functions(ucx, why, why_size) == 0) {
        return ucx;
    }
    /* No dlclose: UCX starts threads and hooks when it is loaded. */
    free(ucx);
    return NULL;
}

void p2pkv_ucx_library_version(const p2pkv_ucx_library *ucx, unsigned version[3]) {
    ucx->ucp_get_version(&version[0], &version[1], &version[2]);
}

int p2pkv_ucx_library_file(const p2pkv_ucx_library *ucx, char *path, size_t size) {
    Dl_info info;
    if (dladdr(*(void *const *)&ucx->ucp_init_version, &info) == 0 || info.dli_fname == NULL)
        return -1;
    return snprintf(path, size, "%s", info.dli_fname) < (int)size ? 0 : -1;
}

const char *p2pkv_ucx_status_text(const p2pkv_ucx_library *ucx, int status) {
    return ucx->ucs_status_string((ucs_status_t)status);
}

void p2pkv_ucx_headers_version(unsigned version[2]) {
    version[0] = UCP_API_MAJOR;
    version[1] = UCP_API_MINOR;
}
