#include "../kernels/bytes.h"
#include "chunk_codec.h"
#include "chunk_header.h"

static uint64_t blocks_bound(const llmaas_kv_geom * geom, int codec, uint32_t n_tokens) {
    uint64_t        bytes = llmaas_body_pad(codec);
    llmaas_kv_walk  walk  = llmaas_kv_walk_begin(geom, n_tokens);
    llmaas_kv_plane plane;
    while (llmaas_kv_walk_next(&walk, &plane)) {
        bytes += llmaas_block_bound(llmaas_block_codec(codec, &plane), &plane, n_tokens);
    }
    return bytes;
}

static uint64_t planes_bound(const llmaas_kv_geom * geom, uint32_t bits, uint32_t n_tokens) {
    const llmaas_embed_sizes sizes = llmaas_embed_measure(geom, n_tokens);
    return sizes.raw + sizes.side + bits * sizes.plane;
}

size_t llmaas_chunk_bound(const llmaas_kv_geom * geom, int codec, uint32_t bits, uint32_t n_tokens) {
    const bool planes = codec == LLMAAS_CODEC_PLANES;
    if (codec < LLMAAS_CODEC_RAW || codec > LLMAAS_CODEC_PLANES || (planes && (bits < 1 || bits > LLMAAS_CHUNK_BITS)) ||
        n_tokens < 1 || n_tokens > LLMAAS_CHUNK_MAX_TOKENS || llmaas_kv_geom_check(geom) != LLMAAS_OK) {
        return 0;
    }
    const uint64_t bytes = LLMAAS_CHUNK_HEADER + (planes ? planes_bound(geom, bits, n_tokens) : blocks_bound(geom, codec, n_tokens));
    return bytes > SIZE_MAX / 2 ? 0 : (size_t) bytes;
}

/* Encode a block. Return its bytes, 0 if the codec cannot represent a value. */
static uint64_t encode_block(llmaas_codec codec, const llmaas_kv_span * span, uint8_t * dst) {
    switch (codec) {
        case LLMAAS_CODEC_LOSSLESS: return llmaas_lossless_encode(span, dst);
        case LLMAAS_CODEC_INT8:
            if (!llmaas_int8_encode(span, dst)) {
                return 0;
            }
            break;
        default: llmaas_raw_encode(span, dst); break;
    }
    return llmaas_block_bound(codec, &span->plane, span->n_tokens);
}

static llmaas_status encode_planes(const llmaas_kv_geom * geom, uint32_t bits, llmaas_kv_span * span, uint8_t * dst,
                                   const uint8_t * blob, uint64_t * plane_bytes) {
    const llmaas_embed_sizes sizes = llmaas_embed_measure(geom, span->n_tokens);
    llmaas_embed_at          at    = llmaas_embed_begin(&sizes, bits);
    llmaas_kv_walk           walk  = llmaas_kv_walk_begin(geom, (uint32_t) span->n_cells);
    *plane_bytes = sizes.plane;
    while (llmaas_kv_walk_next(&walk, &span->plane)) {
        span->src = blob + span->plane.data;
        if (!llmaas_embed_encode(span, &at, dst)) {
            return LLMAAS_EUNSUPPORTED;
        }
    }
    return LLMAAS_OK;
}

static llmaas_status encode_blocks(const llmaas_kv_geom * geom, int codec, llmaas_kv_span * span, uint8_t * dst,
                                   const uint8_t * blob, uint64_t * n_body) {
    llmaas_kv_walk walk = llmaas_kv_walk_begin(geom, (uint32_t) span->n_cells);
    uint64_t       done = 0;
    while (llmaas_kv_walk_next(&walk, &span->plane)) {
        span->src = blob + span->plane.data;
        const uint64_t bytes = encode_block(llmaas_block_codec(codec, &span->plane), span, dst + done);
        if (bytes == 0) {
            return LLMAAS_EUNSUPPORTED;
        }
        done += bytes;
    }
    memset(dst + done, 0, (size_t) llmaas_body_pad(codec));
    *n_body = done + llmaas_body_pad(codec);
    return LLMAAS_OK;
}

llmaas_status llmaas_chunk_encode(
    const llmaas_kv_geom * geom, int codec, uint32_t bits, const uint8_t * blob, size_t size, uint32_t n_cells,
    uint32_t first_cell, uint32_t n_tokens, const uint8_t * key, uint8_t * dst, size_t cap, size_t * n_written) {
    const size_t bound = llmaas_chunk_bound(geom, codec, bits, n_tokens);
    if (bound == 0 || !blob || !key || !dst || !n_written || size != llmaas_blob_size(geom, n_cells) ||
        n_tokens > n_cells || first_cell > n_cells - n_tokens) {
        return LLMAAS_EINVAL;
    }
    if (cap < bound) {
        return LLMAAS_ESPACE;
    }
    llmaas_kv_span span = {.n_cells = n_cells, .first_cell = first_cell, .n_tokens = n_tokens};
    llmaas_chunk_info info = {
        .codec     = (uint32_t) codec,
        .n_tokens  = n_tokens,
        .n_layer   = geom->n_layer,
        .type_k    = geom->type_k,
        .type_v    = geom->type_v,
        .geom_hash = llmaas_kv_geom_hash(geom),
    };
    uint8_t *     body        = dst + LLMAAS_CHUNK_HEADER;
    uint64_t      plane_bytes = 0;
    llmaas_status status;
    if (codec == LLMAAS_CODEC_PLANES) {
        info.bits       = bits;
        info.body_bytes = bound - LLMAAS_CHUNK_HEADER;
        status          = encode_planes(geom, bits, &span, body, blob, &plane_bytes);
    } else {
        status = encode_blocks(geom, codec, &span, body, blob, &info.body_bytes);
    }
    if (status != LLMAAS_OK) {
        return status;
    }
    llmaas_chunk_seal(dst, &info, plane_bytes, key);
    *n_written = LLMAAS_CHUNK_HEADER + (size_t) info.body_bytes;
    return LLMAAS_OK;
}
