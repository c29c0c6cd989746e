/* One-sided batches over UCX: one context and one worker, driven by one thread. */
#include "ucx.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { POLLS_PER_CLOCK = 16 };

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* -- the engine */

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

/* -- links */

static void remote_free(const p2pkv_ucx_library *ucx, struct remote *remote) {
    for (size_t i = 0; i < remote->chunks; i++)
        ucx->ucp_rkey_destroy(remote->rkey[i]);
    free(remote);
}

static void link_drop_remotes(p2pkv_ucx_link *link) {
    for (size_t i = 0; i < link->remote_count; i++)
        if (link->remotes[i] != NULL)
            remote_free(link->engine->ucx, link->remotes[i]);
    free(link->remotes);
    link->remotes = NULL, link->remote_count = 0;
}

/* Requests under way refer to the remote keys, so those stay until UCX is done with all. */
static void link_settle(p2pkv_ucx_link *link) {
    if (!link->closed || link->batches != 0)
        return;
    link_drop_remotes(link);
    link->engine->link_count--;
    ring_move(&link->engine->gone, &link->ring);
}

/* UCX calls this inside ucp_worker_progress, where an endpoint must not be closed. */
static void on_link_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    p2pkv_ucx_link *link = arg;
    (void)ep;
    if (link->closing || link->lost != 0)
        return;
    link->lost = status;
    link->engine->lost_count++;
}

int p2pkv_ucx_link_open(p2pkv_ucx_engine *engine, uint64_t id, const uint8_t *address,
                        p2pkv_ucx_link **out) {
    p2pkv_ucx_link *link = calloc(1, sizeof *link);
    if (link == NULL)
        return P2PKV_UCX_NO_MEMORY;
    link->engine = engine, link->id = id;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_link_error, .arg = link},
    };
    ucs_status_t status = engine->ucx->ucp_ep_create(engine->worker, &params, &link->ep);
    if (status != UCS_OK) {
        free(link);
        return status;
    }
    ring_append(&engine->links, &link->ring);
    engine->link_count++;
    *out = link;
    return 0;
}

static int link_room(p2pkv_ucx_link *link, uint64_t key) {
    if (key < link->remote_count)
        return 0;
    struct remote **grown = realloc(link->remotes, (size_t)(key + 1) * sizeof *grown);
    if (grown == NULL)
        return P2PKV_UCX_NO_MEMORY;
    memset(grown + link->remote_count, 0, (size_t)(key + 1 - link->remote_count) * sizeof *grown);
    link->remotes = grown, link->remote_count = (size_t)key + 1;
    return 0;
}

int p2pkv_ucx_link_attach(p2pkv_ucx_link *link, uint64_t key, uint64_t address, uint64_t length,
                          uint64_t chunk, const uint8_t *packed, const uint64_t *ends,
                          uint64_t chunks) {
    const p2pkv_ucx_library *ucx = link->engine->ucx;
    int error = link_room(link, key);
    if (error != 0)
        return error;
    struct remote *remote = calloc(1, sizeof *remote + (size_t)chunks * sizeof remote->rkey[0]);
    if (remote == NULL)
        return P2PKV_UCX_NO_MEMORY;
    remote->address = address, remote->length = length, remote->chunk = chunk;
    for (; remote->chunks < chunks; remote->chunks++) {
        const uint8_t *start = packed + (remote->chunks > 0 ? ends[remote->chunks - 1] : 0);
        ucs_status_t status = ucx->ucp_ep_rkey_unpack(link->ep, start,
                                                      &remote->rkey[remote->chunks]);
        if (status != UCS_OK) {
            remote_free(ucx, remote);
            return status;
        }
    }
    link->remotes[key] = remote;
    return 0;
}

int p2pkv_ucx_link_transports(p2pkv_ucx_link *link, char *out, size_t size) {
    out[0] = 0;
#if UCP_API_VERSION >= UCP_VERSION(1, 15)
    unsigned version[3];
    p2pkv_ucx_library_version(link->engine->ucx, version);
    if (version[1] < 15)
        return 0;
    ucp_transport_entry_t entries[32];
    ucp_ep_attr_t attr = {
        .field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS,
        .transports = {.entries = entries, .num_entries = 32, .entry_size = sizeof entries[0]},
    };
    ucs_status_t status = link->engine->ucx->ucp_ep_query(link->ep, &attr);
    if (status != UCS_OK)
        return status;
    size_t used = 0;
    for (unsigned i = 0; i < attr.transports.num_entries && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%s/%s", i > 0 ? " " : "",
                                 entries[i].transport_name, entries[i].device_name);
#else
    (void)link, (void)size;
#endif
    return 0;
}

static void on_link_closed(void *request, ucs_status_t status, void *arg) {
    p2pkv_ucx_link *link = arg;
    (void)status;
    link->engine->ucx->ucp_request_free(request);
    link->closed = 1;
    link_settle(link);
}

void p2pkv_ucx_link_close(p2pkv_ucx_link *link) {
    if (link->closing)
        return;
    if (link->lost != 0)
        link->lost = 0, link->engine->lost_count--;
    link->closing = 1;
    ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_EP_CLOSE_FLAG_FORCE, /* without it a dead peer is waited for */
        .cb.send = on_link_closed,
        .user_data = link,
    };
    ucs_status_ptr_t request = link->engine->ucx->ucp_ep_close_nbx(link->ep, &param);
    if (UCS_PTR_IS_PTR(request))
        return;
    link->closed = 1;
    link_settle(link);
}

/* -- batches */

static void batch_release(struct batch *batch) {
    if (--batch->waiting > 0)
        return;
    for (size_t i = 0; i < batch->count; i++)
        __atomic_fetch_sub(&batch->region[i]->pieces, 1, __ATOMIC_RELEASE);
    p2pkv_ucx_link *link = batch->link;
    ring_move(&link->engine->done, &batch->ring);
    link->engine->active_count--;
    link->batches--;
    link_settle(link);
}

static void batch_note(struct batch *batch, ucs_status_t status) {
    if (status != UCS_OK && batch->status == UCS_OK)
        batch->status = status;
}

static void on_request_done(void *request, ucs_status_t status, void *arg) {
    struct batch *batch = arg;
    batch_note(batch, status);
    batch->link->engine->ucx->ucp_request_free(request);
    batch_release(batch);
}

/* What a call that may go on returned: nothing (done), an error, or a request. */
static void batch_follow(struct batch *batch, ucs_status_ptr_t request) {
    if (UCS_PTR_IS_PTR(request))
        batch->waiting++;
    else
        batch_note(batch, UCS_PTR_STATUS(request));
}

static int find_remote(const p2pkv_ucx_link *link, const p2pkv_ucx_piece *piece) {
    if (piece->key >= link->remote_count || link->remotes[piece->key] == NULL)
        return P2PKV_UCX_NO_KEY;
    const struct remote *remote = link->remotes[piece->key];
    if (!inside(piece->remote, piece->length, remote->address, remote->length))
        return P2PKV_UCX_NOT_REMOTE;
    return 0;
}

/* Most batches stay in one region, so the last one is tried first. */
static p2pkv_ucx_region *find_region(const p2pkv_ucx_engine *engine, p2pkv_ucx_region *last,
                                     const p2pkv_ucx_piece *piece) {
    if (last != NULL && inside(piece->local, piece->length, last->address, last->length))
        return last;
    size_t at = p2pkv_ucx_region_place(engine, piece->local);
    if (at == engine->region_count)
        return NULL;
    p2pkv_ucx_region *region = engine->regions[at];
    return inside(piece->local, piece->length, region->address, region->length) ? region : NULL;
}

/* Finds the memory of all pieces and keeps the regions from being unmapped. */
static int batch_check(struct batch *batch, const p2pkv_ucx_piece *pieces, size_t count,
                       size_t *piece) {
    p2pkv_ucx_engine *engine = batch->link->engine;
    p2pkv_ucx_region *last = NULL;
    int error = 0;
    pthread_mutex_lock(&engine->lock);
    for (size_t i = 0; i < count && error == 0; i++) {
        *piece = i;
        error = find_remote(batch->link, &pieces[i]);
        last = find_region(engine, last, &pieces[i]);
        if (error == 0 && last == NULL)
            error = P2PKV_UCX_NOT_LOCAL;
        batch->region[i] = last;
    }
    if (error == 0) {
        for (size_t i = 0; i < count; i++)
            __atomic_fetch_add(&batch->region[i]->pieces, 1, __ATOMIC_RELAXED);
        batch->count = count;
    }
    pthread_mutex_unlock(&engine->lock);
    return error;
}

static uint64_t smallest(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t least = a < b ? a : b;
    return least < c ? least : c;
}

/* A piece goes in parts that stay inside one chunk on either side. */
static void post_piece(struct batch *batch, int verb, const p2pkv_ucx_piece *piece,
                       const p2pkv_ucx_region *region) {
    const p2pkv_ucx_library *ucx = batch->link->engine->ucx;
    const struct remote *remote = batch->link->remotes[piece->key];
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMH,
        .cb.send = on_request_done,
        .user_data = batch,
    };
    if (region->memory_type >= 0) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        param.memory_type = (ucs_memory_type_t)region->memory_type;
    }
    for (uint64_t done = 0; done < piece->length && batch->status == UCS_OK;) {
        uint64_t from = piece->local - region->address + done;
        uint64_t to = piece->remote - remote->address + done;
        uint64_t part = smallest(piece->length - done, region->chunk - from % region->chunk,
                                 remote->chunk - to % remote->chunk);
        void *memory = (void *)(uintptr_t)(piece->local + done);
        ucp_rkey_h rkey = remote->rkey[to / remote->chunk];
        param.memh = region->memh[from / region->chunk];
        ucs_status_ptr_t request =
            verb == P2PKV_UCX_WRITE
                ? ucx->ucp_put_nbx(batch->link->ep, memory, part, piece->remote + done, rkey, &param)
                : ucx->ucp_get_nbx(batch->link->ep, memory, part, piece->remote + done, rkey,
                                   &param);
        batch_follow(batch, request);
        done += part;
    }
}

/* A write is done at once for the sender; the flush is done when the peer has it. */
static void post_flush(struct batch *batch) {
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = on_request_done,
        .user_data = batch,
    };
    batch_follow(batch, batch->link->engine->ucx->ucp_ep_flush_nbx(batch->link->ep, &param));
}

int p2pkv_ucx_post(p2pkv_ucx_link *link, int verb, uint64_t id, const p2pkv_ucx_piece *pieces,
                   size_t count, size_t *piece) {
    *piece = 0;
    struct batch *batch = calloc(1, sizeof *batch + count * sizeof batch->region[0]);
    if (batch == NULL)
        return P2PKV_UCX_NO_MEMORY;
    batch->link = link, batch->id = id, batch->waiting = 1;
    int error = batch_check(batch, pieces, count, piece);
    if (error != 0) {
        free(batch);
        return error;
    }
    ring_append(&link->engine->active, &batch->ring);
    link->engine->active_count++;
    link->batches++;
    for (size_t i = 0; i < count && batch->status == UCS_OK; i++)
        post_piece(batch, verb, &pieces[i], batch->region[i]);
    if (verb == P2PKV_UCX_WRITE && batch->status == UCS_OK)
        post_flush(batch);
    batch_release(batch);
    return 0;
}

/* -- progress */

static int empty(const struct ring *head) {
    return head->next == head;
}

/* Until nothing is left and the descriptor is armed (0), time is over (1), or an error. */
static int poll_and_arm(p2pkv_ucx_engine *engine, int64_t spin_ns, int64_t budget_ns) {
    const p2pkv_ucx_library *ucx = engine->ucx;
    int64_t start = now_ns();
    for (unsigned polls = 0;;) {
        while (ucx->ucp_worker_progress(engine->worker) != 0)
            if (++polls % POLLS_PER_CLOCK == 0 && now_ns() - start > budget_ns)
                return 1;
        int64_t spent = now_ns() - start;
        if (spent < spin_ns && engine->active_count > 0 && empty(&engine->done))
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
        if (empty(&engine->links) || now_ns() >= deadline_ns)
            return;
        nanosleep(&pause, NULL);
    }
}

/* What UCX would not finish: keys are freed before their worker, batches after it, since it may
 * still call back about them. */
static uint64_t destroy(p2pkv_ucx_engine *engine) {
    uint64_t unfinished = engine->active_count;
    for (EACH(at, after, &engine->links))
        link_drop_remotes(ENTRY(at, p2pkv_ucx_link));
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
