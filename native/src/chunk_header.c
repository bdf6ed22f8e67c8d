#include "chunk_header.h"

#include "../kernels/kernels.h"
#include "../kernels/bytes.h"

enum {
    AT_VERSION = 4,
    AT_HEADER  = 6,
    AT_CODEC   = 8,
    AT_BITS    = 9,
    AT_TOKENS  = 10,
    AT_LAYERS  = 12,
    AT_TYPE_K  = 16,
    AT_TYPE_V  = 20,
    AT_GEOM    = 24,
    AT_BODY    = 32,
    AT_KEY     = 40,
    AT_CRCS    = 72,
    AT_PLANE   = 104,
    AT_CRC     = 124,
};

static const uint8_t magic[4] = {'L', 'K', 'V', 'C'};

static uint32_t header_crc(const uint8_t * payload) { return llmaas_k()->crc32c(0, payload, AT_CRC); }

static uint32_t body_crc(uint32_t crc, const uint8_t * payload, uint64_t body_bytes) {
    return llmaas_k()->crc32c(crc, payload + LLMAAS_CHUNK_HEADER, (size_t) body_bytes);
}

/* Store the CRC of every prefix of the body that ends with a plane, so that each can be checked without the rest. */
static void seal_planes(uint8_t * payload, const llmaas_chunk_info * info, uint64_t plane_bytes) {
    const uint8_t * at  = payload + LLMAAS_CHUNK_HEADER + info->body_bytes - info->bits * plane_bytes;
    uint32_t        crc = body_crc(0, payload, info->body_bytes - info->bits * plane_bytes);
    for (uint32_t bits = 1; bits <= info->bits; ++bits, at += plane_bytes) {
        crc = llmaas_k()->crc32c(crc, at, (size_t) plane_bytes);
        store_u32(payload + AT_CRCS + 4 * (bits - 1), crc);
    }
    payload[AT_BITS] = (uint8_t) info->bits;
    store_u64(payload + AT_PLANE, plane_bytes);
    store_u32(payload + AT_CRC, header_crc(payload));
}

void llmaas_chunk_seal(uint8_t * payload, const llmaas_chunk_info * info, uint64_t plane_bytes, const uint8_t * key) {
    memset(payload, 0, LLMAAS_CHUNK_HEADER);
    memcpy(payload, magic, sizeof magic);
    store_u16(payload + AT_VERSION, LLMAAS_CHUNK_VERSION);
    store_u16(payload + AT_HEADER, LLMAAS_CHUNK_HEADER);
    payload[AT_CODEC] = (uint8_t) info->codec;
    store_u16(payload + AT_TOKENS, (uint16_t) info->n_tokens);
    store_u32(payload + AT_LAYERS, info->n_layer);
    store_i32(payload + AT_TYPE_K, info->type_k);
    store_i32(payload + AT_TYPE_V, info->type_v);
    store_u64(payload + AT_GEOM, info->geom_hash);
    store_u64(payload + AT_BODY, info->body_bytes);
    memcpy(payload + AT_KEY, key, LLMAAS_CHUNK_KEY);
    if (info->codec == LLMAAS_CODEC_PLANES) {
        seal_planes(payload, info, plane_bytes);
    } else {
        store_u32(payload + AT_CRC, body_crc(header_crc(payload), payload, info->body_bytes));
    }
}

/* Return how many planes a body of this size has; 0 if the size fits no number of planes. */
static uint32_t bits_of(const uint8_t * payload, uint64_t whole, uint64_t body_bytes) {
    const uint32_t bits  = payload[AT_BITS];
    const uint64_t plane = load_u64(payload + AT_PLANE);
    if (bits < 1 || bits > LLMAAS_CHUNK_BITS || plane > whole / bits || body_bytes > whole) {
        return 0;
    }
    const uint64_t missing = whole - body_bytes;
    if (missing == 0) {
        return bits;
    }
    return plane > 0 && missing % plane == 0 && missing / plane < bits ? bits - (uint32_t) (missing / plane) : 0;
}

/* Fill in body_bytes and bits, which depend on how much of the body there is. */
static bool measure_body(const uint8_t * payload, size_t size, llmaas_chunk_info * info) {
    const uint64_t whole = load_u64(payload + AT_BODY);
    info->body_bytes = size - LLMAAS_CHUNK_HEADER;
    if (info->codec != LLMAAS_CODEC_PLANES) {
        return info->body_bytes == whole;
    }
    info->bits = bits_of(payload, whole, info->body_bytes);
    return info->bits > 0;
}

llmaas_status llmaas_chunk_peek(const uint8_t * payload, size_t size, llmaas_chunk_info * info) {
    if (!payload || !info) {
        return LLMAAS_EINVAL;
    }
    if (size < LLMAAS_CHUNK_HEADER || memcmp(payload, magic, sizeof magic) != 0) {
        return LLMAAS_ECORRUPT;
    }
    if (load_u16(payload + AT_VERSION) != LLMAAS_CHUNK_VERSION) {
        return LLMAAS_EUNSUPPORTED;
    }
    *info = (llmaas_chunk_info) {
        .codec      = payload[AT_CODEC],
        .n_tokens   = load_u16(payload + AT_TOKENS),
        .n_layer    = load_u32(payload + AT_LAYERS),
        .type_k     = load_i32(payload + AT_TYPE_K),
        .type_v     = load_i32(payload + AT_TYPE_V),
        .geom_hash  = load_u64(payload + AT_GEOM),
    };
    const bool ok = load_u16(payload + AT_HEADER) == LLMAAS_CHUNK_HEADER && info->codec <= LLMAAS_CODEC_PLANES &&
                    info->n_tokens >= 1 && info->n_tokens <= LLMAAS_CHUNK_MAX_TOKENS && info->n_layer >= 1 &&
                    info->n_layer <= LLMAAS_KV_MAX_LAYERS && measure_body(payload, size, info);
    return ok ? LLMAAS_OK : LLMAAS_ECORRUPT;
}

llmaas_status llmaas_chunk_verify(const uint8_t * payload, size_t size, const uint8_t * key) {
    llmaas_chunk_info   info;
    const llmaas_status status = llmaas_chunk_peek(payload, size, &info);
    if (status != LLMAAS_OK) {
        return status;
    }
    if (key && memcmp(payload + AT_KEY, key, LLMAAS_CHUNK_KEY) != 0) {
        return LLMAAS_ESTALE;
    }
    uint32_t crc  = header_crc(payload);
    uint32_t want = load_u32(payload + AT_CRC);
    if (info.codec == LLMAAS_CODEC_PLANES) {
        if (crc != want) {
            return LLMAAS_ECORRUPT;
        }
        crc  = 0;
        want = load_u32(payload + AT_CRCS + 4 * (info.bits - 1));
    }
    return body_crc(crc, payload, info.body_bytes) == want ? LLMAAS_OK : LLMAAS_ECORRUPT;
}

llmaas_status llmaas_chunk_cut(const uint8_t * payload, size_t size, uint32_t bits, size_t * new_size) {
    llmaas_chunk_info   info;
    const llmaas_status status = llmaas_chunk_peek(payload, size, &info);
    if (!new_size || bits < 1 || bits > LLMAAS_CHUNK_BITS) {
        return LLMAAS_EINVAL;
    }
    if (status != LLMAAS_OK) {
        return status;
    }
    const uint32_t n_less = info.bits > bits ? info.bits - bits : 0;
    *new_size = size - n_less * (size_t) load_u64(payload + AT_PLANE);
    return LLMAAS_OK;
}
