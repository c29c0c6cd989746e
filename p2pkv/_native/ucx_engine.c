/* An engine: one context and one worker, their progress and their end. */
#include "ucx.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { POLLS_PER_CLOCK = 16 };
static const int64_t WAIT_BUDGET_NS = 10000000; /* then the deadline is looked at */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static ucs_status_t read_options(const p2pkv_ucx_library *ucx, const char *const *options,
                                 size_t count, ucp_config_t **config, char *why, size_t why_size) {
    ucs_status_t status = ucx->ucp_config_read(NULL, NULL, config);
    if (status != UCS_OK) {
        snprintf(why, why_size, "reading UCX_* variables: %s", ucx->ucs_status_string(status));
        return status;
    }
    for (size_t i = 0; i < count; i++) {
        const char *name = options[2 * i], *value = options[2 * i + 1];
        status = ucx->ucp_config_modify(*config, name, value);
        if (status != UCS_OK) {
            snprintf(why, why_size, "option %s=%s: %s", name, value,
                     ucx->ucs_status_string(status));
            ucx->ucp_config_release(*config);
            return status;
        }
    }
    return UCS_OK;
}

static ucs_status_t open_context(p2pkv_ucx_engine *engine, const char *const *options,
                                 size_t count, char *why, size_t why_size) {
    const p2pkv_ucx_library *ucx = engine->ucx;
    ucp_config_t *config;
    ucs_status_t status = read_options(ucx, options, count, &config, why, why_size);
    if (status != UCS_OK)
        return status;
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED |
                      UCP_PARAM_FIELD_NAME,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP,
        .mt_workers_shared = 1, /* regions are mapped on other threads */
        .name = "p2pkv",
    };
    status = ucx->ucp_init_version(P2PKV_UCX_API_MAJOR, P2PKV_UCX_API_MINOR, &params, config,
                                   &engine->context);
    ucx->ucp_config_release(config);
    if (status != UCS_OK)
        snprintf(why, why_size, "ucp_init: %s", ucx->ucs_status_string(status));
    return status;
}

static ucs_status_t open_worker(p2pkv_ucx_engine *engine, char *why, size_t why_size) {
    const p2pkv_ucx_library *ucx = engine->ucx;
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
    };
    ucs_status_t status = ucx->ucp_worker_create(engine->context, &params, &engine->worker);
    if (status != UCS_OK) {
        snprintf(why, why_size, "ucp_worker_create: %s", ucx->ucs_status_string(status));
        return status;
    }
    status = ucx->ucp_worker_get_efd(engine->worker, &engine->event_fd);
    if (status != UCS_OK) {
        snprintf(why, why_size, "no event descriptor: %s", ucx->ucs_status_string(status));
        ucx->ucp_worker_destroy(engine->worker);
    }
    return status;
}

p2pkv_ucx_engine *p2pkv_ucx_engine_open(const p2pkv_ucx_library *ucx, const char *const *options,
                                        size_t count, char *why, size_t why_size) {
    p2pkv_ucx_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL) {
        snprintf(why, why_size, "out of memory");
        return NULL;
    }
    engine->ucx = ucx;
    ring_init(&engine->links), ring_init(&engine->gone);
    ring_init(&engine->active), ring_init(&engine->done);
    if (open_context(engine, options, count, why, why_size) != UCS_OK) {
        free(engine);
        return NULL;
    }
    if (open_worker(engine, why, why_size) != UCS_OK) {
        ucx->ucp_cleanup(engine->context);
        free(engine);
        return NULL;
    }
    pthread_mutex_init(&engine->lock, NULL);
    return engine;
}

int p2pkv_ucx_engine_event_fd(const p2pkv_ucx_engine *engine) {
    return engine->event_fd;
}

int p2pkv_ucx_engine_address(p2pkv_ucx_engine *engine, uint8_t *out, size_t size, size_t *length) {
    const p2pkv_ucx_library *ucx = engine->ucx;
    ucp_address_t *address;
    ucs_status_t status = ucx->ucp_worker_get_address(engine->worker, &address, length);
    if (status != UCS_OK)
        return status;
    int fits = *length <= size;
    if (fits)
        memcpy(out, address, *length);
    ucx->ucp_worker_release_address(engine->worker, address);
    return fits ? 0 : P2PKV_UCX_SMALL;
}

int p2pkv_ucx_engine_describe(p2pkv_ucx_engine *engine, char *out, size_t size) {
    FILE *stream = fmemopen(out, size, "w");
    if (stream == NULL)
        return P2PKV_UCX_NO_MEMORY;
    engine->ucx->ucp_context_print_info(engine->context, stream);
    return fclose(stream) == 0 ? 0 : P2PKV_UCX_SMALL;
}

void p2pkv_ucx_engine_counts(p2pkv_ucx_engine *engine, p2pkv_ucx_counts *out) {
    pthread_mutex_lock(&engine->lock);
    out->regions = engine->region_count;
    pthread_mutex_unlock(&engine->lock);
    out->links = engine->link_count;
    out->batches = engine->active_count;
}

/* -- progress */

/* Until nothing is left and the descriptor is armed (0), time is over (1), or an error. */
static int poll_and_arm(p2pkv_ucx_engine *engine, int64_t spin_ns, int64_t budget_ns) {
    const p2pkv_ucx_library *ucx = engine->ucx;
    int64_t start = now_ns();
    for (unsigned polls = 0;;) {
        while (ucx->ucp_worker_progress(engine->worker) != 0)
            if (++polls % POLLS_PER_CLOCK == 0 && now_ns() - start > budget_ns)
                return 1;
        int64_t spent = now_ns() - start;
        if (spent < spin_ns && engine->active_count > 0 && ring_empty(&engine->done))
            continue;
        ucs_status_t status = ucx->ucp_worker_arm(engine->worker);
        if (status != UCS_ERR_BUSY)
            return status;
        if (spent > budget_ns)
            return 1;
    }
}

static int collect_batches(p2pkv_ucx_engine *engine, p2pkv_ucx_event *events, int size) {
    int n = 0;
    for (EACH(at, after, &engine->done)) {
        if (n == size)
            break;
        struct batch *batch = ENTRY(at, struct batch);
        events[n++] = (p2pkv_ucx_event){batch->id, P2PKV_UCX_BATCH_DONE, batch->status};
        ring_remove(at);
        free(batch);
    }
    return n;
}

static int collect_lost(p2pkv_ucx_engine *engine, p2pkv_ucx_event *events, int size) {
    int n = 0;
    for (EACH(at, after, &engine->links)) {
        if (n == size || engine->lost_count == 0)
            break;
        p2pkv_ucx_link *link = ENTRY(at, p2pkv_ucx_link);
        if (link->lost == 0 || link->told)
            continue;
        events[n++] = (p2pkv_ucx_event){link->id, P2PKV_UCX_LINK_LOST, link->lost};
        link->told = 1;
        engine->lost_count--;
    }
    return n;
}

static int collect_gone(p2pkv_ucx_engine *engine, p2pkv_ucx_event *events, int size) {
    int n = 0;
    for (EACH(at, after, &engine->gone)) {
        if (n == size)
            break;
        p2pkv_ucx_link *link = ENTRY(at, p2pkv_ucx_link);
        events[n++] = (p2pkv_ucx_event){link->id, P2PKV_UCX_LINK_GONE, 0};
        ring_remove(at);
        free(link);
    }
    return n;
}

/* The loss of a link comes before the failures of its batches: it has the reason. */
static int collect(p2pkv_ucx_engine *engine, p2pkv_ucx_event *events, int size) {
    int n = collect_lost(engine, events, size);
    n += collect_batches(engine, events + n, size - n);
    return n + collect_gone(engine, events + n, size - n);
}

int p2pkv_ucx_progress(p2pkv_ucx_engine *engine, int64_t spin_ns, int64_t budget_ns,
                       p2pkv_ucx_event *events, int size, int *more, int *status) {
    int outcome = poll_and_arm(engine, spin_ns, budget_ns);
    *status = outcome < 0 ? outcome : 0;
    int n = collect(engine, events, size);
    *more = outcome == 1 || n == size;
    return n;
}

/* Whether `other` is readable, or has ended. */
static int sleep_on(int fd, int other, int64_t limit_ns) {
    struct pollfd entries[] = {{.fd = other, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
    struct timespec limit = {.tv_sec = limit_ns / 1000000000, .tv_nsec = limit_ns % 1000000000};
    return ppoll(entries, 2, &limit, NULL) > 0 && entries[0].revents != 0;
}

int p2pkv_ucx_wait(p2pkv_ucx_engine *engine, int64_t spin_ns, int64_t deadline_ns, int fd,
                   p2pkv_ucx_event *events, int size, int *status) {
    for (;;) {
        int outcome = poll_and_arm(engine, spin_ns, WAIT_BUDGET_NS);
        int n = collect(engine, events, size);
        *status = outcome < 0 ? outcome : 0;
        int64_t left = deadline_ns - now_ns();
        if (n > 0 || outcome < 0 || left <= 0)
            return n;
        /* With work left it only looks. */
        if (sleep_on(engine->event_fd, fd, outcome == 0 ? left : 0))
            return 0;
        spin_ns = 0;
    }
}

/* -- the end */

static void free_events(p2pkv_ucx_engine *engine) {
    p2pkv_ucx_event events[64];
    while (collect(engine, events, 64) > 0)
        continue;
}

static void drain(p2pkv_ucx_engine *engine, int64_t deadline_ns) {
    const struct timespec pause = {.tv_nsec = 50000};
    for (EACH(at, after, &engine->links))
        p2pkv_ucx_link_close(ENTRY(at, p2pkv_ucx_link));
    for (;;) {
        while (engine->ucx->ucp_worker_progress(engine->worker) != 0)
            continue;
        if (ring_empty(&engine->links) || now_ns() >= deadline_ns)
            return;
        nanosleep(&pause, NULL);
    }
}

/* What UCX would not finish: keys are freed before their worker, batches after it, since it may
 * still call back about them. */
static uint64_t destroy(p2pkv_ucx_engine *engine) {
    uint64_t unfinished = engine->active_count;
    for (EACH(at, after, &engine->links))
        p2pkv_ucx_link_drop_remotes(ENTRY(at, p2pkv_ucx_link));
    engine->ucx->ucp_worker_destroy(engine->worker);
    for (EACH(at, after, &engine->active))
        free(ENTRY(at, struct batch));
    for (EACH(at, after, &engine->links))
        free(ENTRY(at, p2pkv_ucx_link));
    free_events(engine);
    return unfinished;
}

uint64_t p2pkv_ucx_engine_close(p2pkv_ucx_engine *engine, int64_t deadline_ns) {
    drain(engine, deadline_ns);
    free_events(engine);
    uint64_t unfinished = destroy(engine);
    while (engine->region_count > 0)
        p2pkv_ucx_region_free(engine->regions[--engine->region_count]);
    free(engine->regions);
    engine->ucx->ucp_cleanup(engine->context);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
    return unfinished;
}
