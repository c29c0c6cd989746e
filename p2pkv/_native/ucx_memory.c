/* Regions: local memory that peers may reach, and that batches may use. */
#include "ucx.h"

#include <stdlib.h>
#include <string.h>

size_t p2pkv_ucx_region_place(const p2pkv_ucx_engine *engine, uint64_t address) {
    size_t low = 0, high = engine->region_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const p2pkv_ucx_region *region = engine->regions[middle];
        if (region->address + (region->length - 1) < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int region_enter(p2pkv_ucx_engine *engine, p2pkv_ucx_region *region) {
    size_t at = p2pkv_ucx_region_place(engine, region->address), count = engine->region_count;
    if (at < count && engine->regions[at]->address <= region->address + (region->length - 1))
        return P2PKV_UCX_OVERLAP;
    if (count == engine->region_room) {
        size_t room = count < 8 ? 8 : 2 * count;
        void *grown = realloc(engine->regions, room * sizeof *engine->regions);
        if (grown == NULL)
            return P2PKV_UCX_NO_MEMORY;
        engine->regions = grown, engine->region_room = room;
    }
    memmove(&engine->regions[at + 1], &engine->regions[at], (count - at) * sizeof region);
    engine->regions[at] = region;
    engine->region_count++;
    return 0;
}

static void region_leave(p2pkv_ucx_region *region) {
    p2pkv_ucx_engine *engine = region->engine;
    size_t at = p2pkv_ucx_region_place(engine, region->address);
    engine->region_count--;
    memmove(&engine->regions[at], &engine->regions[at + 1],
            (engine->region_count - at) * sizeof region);
}

void p2pkv_ucx_region_free(p2pkv_ucx_region *region) {
    for (size_t i = 0; i < region->chunks; i++)
        region->engine->ucx->ucp_mem_unmap(region->engine->context, region->memh[i]);
    free(region);
}

_Static_assert((int)UCS_MEMORY_TYPE_HOST == P2PKV_UCX_HOST, "memory types are UCX's");
_Static_assert((int)UCS_MEMORY_TYPE_CUDA == P2PKV_UCX_CUDA, "memory types are UCX's");
_Static_assert((int)UCS_MEMORY_TYPE_ROCM == P2PKV_UCX_ROCM, "memory types are UCX's");

static ucs_status_t region_map_chunks(p2pkv_ucx_region *region, size_t chunks) {
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
    };
    if (region->memory_type >= 0) {
        params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        params.memory_type = (ucs_memory_type_t)region->memory_type;
    }
    for (; region->chunks < chunks; region->chunks++) {
        uint64_t start = region->chunks * region->chunk, rest = region->length - start;
        params.address = (void *)(uintptr_t)(region->address + start);
        params.length = rest < region->chunk ? rest : region->chunk;
        ucs_status_t status = region->engine->ucx->ucp_mem_map(region->engine->context, &params,
                                                               &region->memh[region->chunks]);
        if (status != UCS_OK)
            return status;
    }
    return UCS_OK;
}

int p2pkv_ucx_region_map(p2pkv_ucx_engine *engine, uint64_t address, uint64_t length,
                         uint64_t chunk, int memory_type, p2pkv_ucx_region **out) {
    size_t chunks = (size_t)((length - 1) / chunk + 1);
    p2pkv_ucx_region *region = calloc(1, sizeof *region + chunks * sizeof region->memh[0]);
    if (region == NULL)
        return P2PKV_UCX_NO_MEMORY;
    region->engine = engine;
    region->address = address, region->length = length, region->chunk = chunk;
    region->memory_type = memory_type;
    int error = region_map_chunks(region, chunks);
    if (error == 0) {
        pthread_mutex_lock(&engine->lock);
        error = region_enter(engine, region);
        pthread_mutex_unlock(&engine->lock);
    }
    if (error != 0) {
        p2pkv_ucx_region_free(region);
        return error;
    }
    *out = region;
    return 0;
}

uint64_t p2pkv_ucx_region_chunks(const p2pkv_ucx_region *region) {
    return region->chunks;
}

int p2pkv_ucx_region_pack(p2pkv_ucx_region *region, uint64_t chunk, uint8_t *out, size_t size,
                          size_t *length) {
    const p2pkv_ucx_library *ucx = region->engine->ucx;
    void *packed;
    ucs_status_t status =
        ucx->ucp_rkey_pack(region->engine->context, region->memh[chunk], &packed, length);
    if (status != UCS_OK)
        return status;
    int fits = *length <= size;
    if (fits)
        memcpy(out, packed, *length);
    ucx->ucp_rkey_buffer_release(packed);
    return fits ? 0 : P2PKV_UCX_SMALL;
}

int p2pkv_ucx_region_unmap(p2pkv_ucx_region *region) {
    p2pkv_ucx_engine *engine = region->engine;
    pthread_mutex_lock(&engine->lock);
    int used = __atomic_load_n(&region->pieces, __ATOMIC_ACQUIRE) != 0;
    if (!used)
        region_leave(region);
    pthread_mutex_unlock(&engine->lock);
    if (used)
        return P2PKV_UCX_IN_USE;
    p2pkv_ucx_region_free(region);
    return 0;
}
