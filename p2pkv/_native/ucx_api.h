/*
 * What Python calls. Read by the compiler through ucx.h and by the cffi builder as it is, so there
 * are no preprocessor lines here.
 *
 * Every function runs without the GIL and reports errors as values: 0, a (negative) ucs_status_t,
 * or one of the positive codes below; `why` gets a text of at most `why_size` bytes with its zero.
 * There is no global state. An engine belongs to one thread, except that regions may be mapped,
 * packed and unmapped on any.
 */

enum {
    P2PKV_UCX_ABI = 2,        /* raised with every change of this file */
    P2PKV_UCX_NO_MEMORY = 1,  /* malloc failed */
    P2PKV_UCX_NOT_LOCAL = 2,  /* a piece's local memory is not inside one registered region */
    P2PKV_UCX_NOT_REMOTE = 3, /* a piece's remote memory is not inside the region it names */
    P2PKV_UCX_NO_KEY = 4,     /* a piece names a region that is not attached to the link */
    P2PKV_UCX_OVERLAP = 5,    /* memory to be mapped is registered already, at least in part */
    P2PKV_UCX_IN_USE = 6,     /* batches under way use the region */
    P2PKV_UCX_SMALL = 7,      /* the caller's buffer is too small; the length needed was set */
    P2PKV_UCX_EMPTY = 8,      /* a piece without bytes */

    P2PKV_UCX_WRITE = 0,
    P2PKV_UCX_READ = 1,

    P2PKV_UCX_ANY_MEMORY = -1, /* UCX finds out */
    P2PKV_UCX_HOST = 0,
    P2PKV_UCX_CUDA = 1,
    P2PKV_UCX_ROCM = 3,

    P2PKV_UCX_BATCH_DONE = 0, /* id of the batch; its memory is not touched any more */
    P2PKV_UCX_LINK_LOST = 1,  /* id of the link; it is to be closed */
    P2PKV_UCX_LINK_GONE = 2   /* id of the link; closed, drained and freed */
};

typedef struct p2pkv_ucx_library p2pkv_ucx_library;
typedef struct p2pkv_ucx_engine p2pkv_ucx_engine;
typedef struct p2pkv_ucx_region p2pkv_ucx_region;
typedef struct p2pkv_ucx_link p2pkv_ucx_link;

/* One part of a batch. */
typedef struct {
    uint64_t local;  /* address in this process */
    uint64_t key;    /* number of the remote region on this link, see p2pkv_ucx_link_attach */
    uint64_t remote; /* address in the peer's process */
    uint64_t length; /* bytes */
} p2pkv_ucx_piece;

typedef struct {
    uint64_t id;
    int32_t what;
    int32_t status;
} p2pkv_ucx_event;

typedef struct {
    uint64_t links, batches, regions;
} p2pkv_ucx_counts;

/* -- the library: loaded for the life of the process, since UCX cannot be unloaded */

/* `path`: a file, a soname, or NULL for a libucp that the process has loaded already. */
p2pkv_ucx_library *p2pkv_ucx_library_open(const char *path, char *why, size_t why_size);
void p2pkv_ucx_library_version(const p2pkv_ucx_library *ucx, unsigned version[3]);
int p2pkv_ucx_library_file(const p2pkv_ucx_library *ucx, char *path, size_t size);
const char *p2pkv_ucx_status_text(const p2pkv_ucx_library *ucx, int status);
void p2pkv_ucx_headers_version(unsigned version[2]);

/* -- the engine: one context and one worker */

/* `options`: `count` pairs of name (without UCX_) and value; they win over the environment. */
p2pkv_ucx_engine *p2pkv_ucx_engine_open(const p2pkv_ucx_library *ucx, const char *const *options,
                                        size_t count, char *why, size_t why_size);
int p2pkv_ucx_engine_event_fd(const p2pkv_ucx_engine *engine);
int p2pkv_ucx_engine_address(p2pkv_ucx_engine *engine, uint8_t *out, size_t size, size_t *length);
/* UCX's own description of devices and transports. */
int p2pkv_ucx_engine_describe(p2pkv_ucx_engine *engine, char *out, size_t size);
void p2pkv_ucx_engine_counts(p2pkv_ucx_engine *engine, p2pkv_ucx_counts *out);
/* Closes links, waits for what is under way until the deadline (CLOCK_MONOTONIC), frees everything
 * else in any case. Returns how many batches were still under way. */
uint64_t p2pkv_ucx_engine_close(p2pkv_ucx_engine *engine, int64_t deadline_ns);

/* Polls until there is nothing left to do and the event descriptor will tell of more, or until
 * `budget_ns` are over: then *more is 1 and it has to be called again. While batches are under way
 * it polls for `spin_ns` before it gives up on them. Returns the number of events. */
int p2pkv_ucx_progress(p2pkv_ucx_engine *engine, int64_t spin_ns, int64_t budget_ns,
                       p2pkv_ucx_event *events, int size, int *more, int *status);

/* Blocks until there are events, `fd` (-1: none) is readable, or the deadline (CLOCK_MONOTONIC) has
 * passed. Polls for `spin_ns`, then sleeps. Returns the number of events; *status is 0 or UCX's
 * error. */
int p2pkv_ucx_wait(p2pkv_ucx_engine *engine, int64_t spin_ns, int64_t deadline_ns, int fd,
                   p2pkv_ucx_event *events, int size, int *status);

/* -- regions: local memory, registered in chunks of at most `chunk` bytes */

/* `length` and `chunk` are not 0; `memory_type`: P2PKV_UCX_ANY_MEMORY, _HOST, ... */
int p2pkv_ucx_region_map(p2pkv_ucx_engine *engine, uint64_t address, uint64_t length,
                         uint64_t chunk, int memory_type, p2pkv_ucx_region **out);
uint64_t p2pkv_ucx_region_chunks(const p2pkv_ucx_region *region);
/* The remote key of one chunk. */
int p2pkv_ucx_region_pack(p2pkv_ucx_region *region, uint64_t chunk, uint8_t *out, size_t size,
                          size_t *length);
int p2pkv_ucx_region_unmap(p2pkv_ucx_region *region);

/* -- links: an endpoint and the remote keys that were unpacked for it */

/* `address`: a worker address from an authenticated peer; UCX trusts it. */
int p2pkv_ucx_link_open(p2pkv_ucx_engine *engine, uint64_t id, const uint8_t *address,
                        p2pkv_ucx_link **out);
/* Makes the peer's region number `key`. `packed` has the remote keys one after the other, `ends`
 * where each ends; UCX trusts them too. */
int p2pkv_ucx_link_attach(p2pkv_ucx_link *link, uint64_t key, uint64_t address, uint64_t length,
                          uint64_t chunk, const uint8_t *packed, const uint64_t *ends,
                          uint64_t chunks);
/* IN_USE while batches under way use the region. */
int p2pkv_ucx_link_detach(p2pkv_ucx_link *link, uint64_t key);
/* "transport/device" of each lane, separated by spaces; empty where UCX is too old to tell. */
int p2pkv_ucx_link_transports(p2pkv_ucx_link *link, char *out, size_t size);
/* Gives up what is under way; the link is freed when UCX is done with it (LINK_GONE). */
void p2pkv_ucx_link_close(p2pkv_ucx_link *link);

/* Posts a whole batch, a write with a flush behind it, so that it is done when the bytes are in the
 * peer's memory. Nothing is posted when a code is returned; *piece is then the one at fault. Errors
 * of UCX come with the event of the batch. */
int p2pkv_ucx_post(p2pkv_ucx_link *link, int verb, uint64_t id, const p2pkv_ucx_piece *pieces,
                   size_t count, size_t *piece);
