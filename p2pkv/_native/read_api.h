/*
 * Read connections (read_protocol.h), as Python sees them; read like api.h, whose rules hold here,
 * too: no preprocessor lines.
 */

enum {
    P2PKV_READ_KEYS = 4096,   /* of one request at most */
    P2PKV_READ_FIGURES = 9    /* as reads.py has them */
};

/* A client's end. `fd`, `payload_max` and `spin_ns` are set by who makes it, the rest is zero. */
typedef struct {
    int fd;
    int spin_pays;
    uint32_t kind, count, id, calls; /* of the request under way, but for `calls` */
    uint32_t start, end;             /* of what is in the buffer */
    uint64_t payload, payload_max;
    int64_t spin_ns;
    uint8_t buffer[16384];
} p2pkv_read_link;

typedef struct {
    uintptr_t index, arena; /* as mapped in this process; must outlive the server */
    uint64_t arena_bytes;
    uint64_t payload_max; /* of one reply; what is over it the owner is asked for */
    int64_t stall_ns;     /* in the middle of something for longer a connection is closed */
    int64_t spin_ns;
    uint32_t connections_max, threads;
    int listener; /* non-blocking, and not closed before `stop` */
    uint8_t token[16];
} p2pkv_read_options;

/* Starts the threads; 0, with *error, if that fails. `stop` returns when they have ended. */
uintptr_t p2pkv_read_server_start(const p2pkv_read_options *options, int *error);
void p2pkv_read_server_stop(uintptr_t server);
void p2pkv_read_server_figures(uintptr_t server, uint64_t *figures);

/* The request that `bytes` begin with: its length, 0 if it is not all there, -1: it is none. */
int64_t p2pkv_read_parse(const uint8_t *bytes, uint64_t have, uint32_t *kind, uint32_t *count);

/* Addresses of the functions of read_client.c: they want the GIL. */
uintptr_t p2pkv_read_function(int which);
