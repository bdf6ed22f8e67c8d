/* Decoding walks plane by plane over a batch of chunks. Then the cells of one plane stay in cache while neighboring
 * chunks fill them: transposed chunks write only 32 bytes of each cache line. */
#include "../kernels/bytes.h"
#include "chunk_codec.h"

#include <stdatomic.h>

enum { BATCH = 64 };

typedef struct job {
    const uint8_t * next; /* unread body and its size; PLANES: the whole body, read at embed */
    uint64_t left;
    llmaas_embed_at embed;
    uint32_t codec;
    uint32_t first_cell;
    uint32_t n_tokens;
} job;

static llmaas_status job_open(const llmaas_kv_geom * geom, uint64_t geom_hash, const uint8_t * payload, uint64_t size,
                              uint32_t first_cell, uint32_t n_cells, job * out) {
    llmaas_chunk_info   info;
    const llmaas_status status = size <= SIZE_MAX ? llmaas_chunk_peek(payload, (size_t) size, &info) : LLMAAS_EINVAL;
    if (status != LLMAAS_OK) {
        return status;
    }
    if (info.geom_hash != geom_hash || info.n_layer != geom->n_layer) {
        return LLMAAS_ESTALE;
    }
    if (info.n_tokens > n_cells || first_cell > n_cells - info.n_tokens) {
        return LLMAAS_EINVAL;
    }
    const uint64_t pad   = llmaas_body_pad((int) info.codec);
    const uint64_t exact = llmaas_chunk_bound(geom, (int) info.codec, info.bits, info.n_tokens) - LLMAAS_CHUNK_HEADER;
    const bool     fits  = info.codec == LLMAAS_CODEC_LOSSLESS ? info.body_bytes >= pad && info.body_bytes <= exact
                                                               : info.body_bytes == exact;
    *out = (job) {
        .next       = payload + LLMAAS_CHUNK_HEADER,
        .left       = info.body_bytes - pad,
        .codec      = info.codec,
        .first_cell = first_cell,
        .n_tokens   = info.n_tokens,
    };
    if (info.codec == LLMAAS_CODEC_PLANES) {
        const llmaas_embed_sizes sizes = llmaas_embed_measure(geom, info.n_tokens);
        out->embed = llmaas_embed_begin(&sizes, info.bits);
        out->left  = 0;
    }
    return fits ? LLMAAS_OK : LLMAAS_ECORRUPT;
}

/* Decode one plane of a job. job_open measured RAW, INT8 and PLANES bodies; only LOSSLESS blocks can still turn out
 * corrupt, and raw blocks between them can run out of bytes. */
static bool job_step(job * j, llmaas_kv_span * span) {
    const llmaas_codec codec = llmaas_block_codec((int) j->codec, &span->plane);
    span->first_cell = j->first_cell;
    span->n_tokens   = j->n_tokens;
    if (j->codec == LLMAAS_CODEC_PLANES) {
        llmaas_embed_decode(span, &j->embed, j->next);
        return true;
    }
    uint64_t bytes;
    if (codec == LLMAAS_CODEC_LOSSLESS) {
        bytes = llmaas_lossless_decode(span, j->next, j->left);
    } else {
        bytes = llmaas_block_bound(codec, &span->plane, j->n_tokens);
        if (bytes > j->left) {
            return false;
        }
        if (codec == LLMAAS_CODEC_INT8) {
            llmaas_int8_decode(span, j->next);
        } else {
            llmaas_raw_decode(span, j->next);
        }
    }
    j->next += bytes;
    j->left -= bytes;
    return bytes > 0;
}

/* Where decoded rows go: to a blob, or to the landings if blob is NULL. */
typedef struct target {
    uint8_t *              blob;
    const llmaas_landing * landings;
    uint32_t               n_cells;
} target;

static void aim(const target * to, uint32_t i_plane, llmaas_kv_span * span) {
    span->n_cells    = to->n_cells;
    span->past_cache = !to->blob;
    if (to->blob) {
        span->dst = to->blob + span->plane.data;
    } else {
        const llmaas_landing * landing = &to->landings[i_plane];
        span->dst = landing->first;
        if (span->plane.trans) {
            span->n_cells = landing->step / span->plane.el;
        }
    }
}

/* Decode a batch. Return how many leading jobs are complete: a corrupt job drops itself and all after it. */
static uint32_t run_batch(const llmaas_kv_geom * geom, job * jobs, uint32_t n, const target * to) {
    llmaas_kv_walk walk = llmaas_kv_walk_begin(geom, to->n_cells);
    llmaas_kv_span span = {0};
    for (uint32_t i_plane = 0; llmaas_kv_walk_next(&walk, &span.plane); ++i_plane) {
        aim(to, i_plane, &span);
        for (uint32_t i = 0; i < n; ++i) {
            if (!job_step(&jobs[i], &span)) {
                n = i;
            }
        }
    }
    for (uint32_t i = 0; i < n; ++i) {
        if (jobs[i].left != 0) {
            n = i;
        }
    }
    return n;
}

static llmaas_status decode(const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads,
                            const uint64_t * sizes, const uint32_t * first_cells, const target * to, uint32_t * n_done) {
    const uint64_t geom_hash = llmaas_kv_geom_hash(geom);
    llmaas_status  status    = LLMAAS_OK;
    while (status == LLMAAS_OK && *n_done < n) {
        job      jobs[BATCH];
        uint32_t n_jobs = 0;
        for (uint32_t i = *n_done; i < n && n_jobs < BATCH; ++i, ++n_jobs) {
            status = job_open(geom, geom_hash, payloads[i], sizes[i], first_cells[i], to->n_cells, &jobs[n_jobs]);
            if (status != LLMAAS_OK) {
                break;
            }
        }
        const uint32_t done = run_batch(geom, jobs, n_jobs, to);
        if (done < n_jobs) {
            status = LLMAAS_ECORRUPT;
        }
        *n_done += done;
    }
    return status;
}

llmaas_status llmaas_chunks_decode(
    const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads, const uint64_t * sizes,
    const uint32_t * first_cells, uint8_t * blob, size_t blob_size, uint32_t n_cells, uint32_t * n_done) {
    if (!n_done) {
        return LLMAAS_EINVAL;
    }
    *n_done = 0;
    if (!blob || (n > 0 && (!payloads || !sizes || !first_cells)) || blob_size == 0 ||
        blob_size != llmaas_blob_size(geom, n_cells)) {
        return LLMAAS_EINVAL;
    }
    const target to = {.blob = blob, .n_cells = n_cells};
    return decode(geom, n, payloads, sizes, first_cells, &to, n_done);
}

/* Return whether a landing fits a plane: it has one piece, or one per channel if the plane is transposed. */
static bool is_whole(const llmaas_landing * landing, const llmaas_kv_plane * plane, uint64_t n_cells) {
    const uint64_t n_pieces = plane->trans ? plane->row / plane->el : 1;
    const uint64_t n_bytes  = n_cells * (plane->row / n_pieces);
    const bool     is_apart = n_pieces == 1 || (landing->step >= n_bytes && landing->step % plane->el == 0);
    return landing->first && landing->n_pieces == n_pieces && landing->n_bytes == n_bytes && is_apart;
}

bool llmaas_landings_fit(
    const llmaas_kv_geom * geom, const llmaas_landing * landings, uint32_t n_landings, uint32_t n_cells) {
    if (llmaas_blob_size(geom, n_cells) == 0 || !landings) {
        return false;
    }
    llmaas_kv_walk  walk = llmaas_kv_walk_begin(geom, n_cells);
    llmaas_kv_plane plane;
    uint32_t        n = 0;
    for (; llmaas_kv_walk_next(&walk, &plane); ++n) {
        if (n == n_landings || !is_whole(&landings[n], &plane, n_cells)) {
            return false;
        }
    }
    return n == n_landings;
}

llmaas_status llmaas_chunks_land(
    const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads, const uint64_t * sizes,
    const uint32_t * first_cells, const llmaas_landing * landings, uint32_t n_landings, uint32_t n_cells,
    uint32_t * n_done) {
    if (!n_done) {
        return LLMAAS_EINVAL;
    }
    *n_done = 0;
    if ((n > 0 && (!payloads || !sizes || !first_cells)) || !llmaas_landings_fit(geom, landings, n_landings, n_cells)) {
        return LLMAAS_EINVAL;
    }
    const target        to     = {.landings = landings, .n_cells = n_cells};
    const llmaas_status status = decode(geom, n, payloads, sizes, first_cells, &to, n_done);
    atomic_thread_fence(memory_order_seq_cst); /* order non-temporal stores, which bypass the caches */
    return status;
}
