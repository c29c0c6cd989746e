/* Links to peers, and batches of one-sided reads and writes over them. */
#include "ucx.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- links */

static void remote_free(const p2pkv_ucx_library *ucx, struct remote *remote) {
    for (size_t i = 0; i < remote->chunks; i++)
        ucx->ucp_rkey_destroy(remote->rkey[i]);
    free(remote);
}

void p2pkv_ucx_link_drop_remotes(p2pkv_ucx_link *link) {
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
    p2pkv_ucx_link_drop_remotes(link);
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
    if (error == 0 && link->remotes[key] != NULL)
        error = P2PKV_UCX_IN_USE;
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

int p2pkv_ucx_link_detach(p2pkv_ucx_link *link, uint64_t key) {
    if (key >= link->remote_count || link->remotes[key] == NULL)
        return P2PKV_UCX_NO_KEY;
    if (link->remotes[key]->pieces != 0)
        return P2PKV_UCX_IN_USE;
    remote_free(link->engine->ucx, link->remotes[key]);
    link->remotes[key] = NULL;
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
    if (link->lost != 0 && !link->told)
        link->engine->lost_count--;
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
    for (size_t i = 0; i < batch->count; i++) {
        batch->place[i].remote->pieces--;
        __atomic_fetch_sub(&batch->place[i].region->pieces, 1, __ATOMIC_RELEASE);
    }
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

static int find_remote(const p2pkv_ucx_link *link, const p2pkv_ucx_piece *piece,
                       struct remote **out) {
    if (piece->key >= link->remote_count || link->remotes[piece->key] == NULL)
        return P2PKV_UCX_NO_KEY;
    *out = link->remotes[piece->key];
    return inside(piece->remote, piece->length, (*out)->address, (*out)->length)
               ? 0
               : P2PKV_UCX_NOT_REMOTE;
}

/* Most batches stay in one region, so the one of the piece before is tried first. */
static int find_region(const p2pkv_ucx_engine *engine, const p2pkv_ucx_piece *piece,
                       const p2pkv_ucx_region *last, p2pkv_ucx_region **out) {
    if (last != NULL && inside(piece->local, piece->length, last->address, last->length)) {
        *out = (p2pkv_ucx_region *)last;
        return 0;
    }
    size_t at = p2pkv_ucx_region_place(engine, piece->local);
    if (at == engine->region_count)
        return P2PKV_UCX_NOT_LOCAL;
    *out = engine->regions[at];
    return inside(piece->local, piece->length, (*out)->address, (*out)->length)
               ? 0
               : P2PKV_UCX_NOT_LOCAL;
}

static int find_places(struct batch *batch, const p2pkv_ucx_piece *pieces, size_t count,
                       size_t *piece) {
    struct place *place = batch->place;
    for (size_t i = 0; i < count; i++) {
        *piece = i;
        if (pieces[i].length == 0)
            return P2PKV_UCX_EMPTY;
        int error = find_remote(batch->link, &pieces[i], &place[i].remote);
        if (error == 0)
            error = find_region(batch->link->engine, &pieces[i],
                                i > 0 ? place[i - 1].region : NULL, &place[i].region);
        if (error != 0)
            return error;
    }
    return 0;
}

/* Finds the memory of all pieces and keeps it registered until the batch is done. */
static int batch_hold(struct batch *batch, const p2pkv_ucx_piece *pieces, size_t count,
                      size_t *piece) {
    p2pkv_ucx_engine *engine = batch->link->engine;
    pthread_mutex_lock(&engine->lock);
    int error = find_places(batch, pieces, count, piece);
    for (size_t i = 0; i < count && error == 0; i++) {
        batch->place[i].remote->pieces++;
        __atomic_fetch_add(&batch->place[i].region->pieces, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&engine->lock);
    batch->count = error == 0 ? count : 0;
    return error;
}

static uint64_t smallest(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t least = a < b ? a : b;
    return least < c ? least : c;
}

/* A piece goes in parts that stay inside one chunk on either side. */
static void post_piece(struct batch *batch, int verb, const p2pkv_ucx_piece *piece,
                       const struct place *place) {
    const p2pkv_ucx_library *ucx = batch->link->engine->ucx;
    const p2pkv_ucx_region *region = place->region;
    const struct remote *remote = place->remote;
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
        uint64_t target = piece->remote + done;
        ucp_ep_h ep = batch->link->ep;
        ucp_rkey_h rkey = remote->rkey[to / remote->chunk];
        param.memh = region->memh[from / region->chunk];
        batch_follow(batch, verb == P2PKV_UCX_WRITE
                                ? ucx->ucp_put_nbx(ep, memory, part, target, rkey, &param)
                                : ucx->ucp_get_nbx(ep, memory, part, target, rkey, &param));
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
    struct batch *batch = calloc(1, sizeof *batch + count * sizeof batch->place[0]);
    if (batch == NULL)
        return P2PKV_UCX_NO_MEMORY;
    batch->link = link, batch->id = id, batch->waiting = 1;
    int error = batch_hold(batch, pieces, count, piece);
    if (error != 0) {
        free(batch);
        return error;
    }
    ring_append(&link->engine->active, &batch->ring);
    link->engine->active_count++;
    link->batches++;
    for (size_t i = 0; i < count && batch->status == UCS_OK; i++)
        post_piece(batch, verb, &pieces[i], &batch->place[i]);
    if (verb == P2PKV_UCX_WRITE && batch->status == UCS_OK)
        post_flush(batch);
    batch_release(batch);
    return 0;
}
