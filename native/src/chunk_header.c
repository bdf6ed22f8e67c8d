#include "chunk_header.h"

#include "../kernels/kernels.h"
#include "bytes.h"

enum {
    AT_VERSION = 4,
    AT_HEADER  = 6,
    AT_CODEC   = 8,
    AT_TOKENS  = 10,
    AT_LAYERS  = 12,
    AT_TYPE_K  = 16,
    AT_TYPE_V  = 20,
    AT_GEOM    = 24,
    AT_BODY    = 32,
    AT_KEY     = 40,
    AT_CRC     = 124,
};

static const uint8_t magic[4] = {'L', 'K', 'V', 'C'};

static uint32_t payload_crc(const uint8_t * payload, uint64_t body_bytes) {
    const llmaas_kernels * k = llmaas_k();
    return k->crc32c(k->crc32c(0, payload, AT_CRC), payload + LLMAAS_CHUNK_HEADER, (size_t) body_bytes);
}

void llmaas_chunk_seal(uint8_t * payload, const llmaas_chunk_info * info, const uint8_t * key) {
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
    store_u32(payload + AT_CRC, payload_crc(payload, info->body_bytes));
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
        .body_bytes = load_u64(payload + AT_BODY),
    };
    const bool ok = load_u16(payload + AT_HEADER) == LLMAAS_CHUNK_HEADER && info->codec <= LLMAAS_CODEC_INT8 &&
                    info->n_tokens >= 1 && info->n_tokens <= LLMAAS_CHUNK_MAX_TOKENS && info->n_layer >= 1 &&
                    info->n_layer <= LLMAAS_KV_MAX_LAYERS && info->body_bytes == size - LLMAAS_CHUNK_HEADER;
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
    return load_u32(payload + AT_CRC) == payload_crc(payload, info.body_bytes) ? LLMAAS_OK : LLMAAS_ECORRUPT;
}
