/* Unaligned little-endian loads and stores, for payload and blob fields, which have no alignment. */
#ifndef LLMAAS_BYTES_H
#define LLMAAS_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the blob and chunk formats are read with native loads: a little-endian machine is needed"
#endif

static inline uint16_t load_u16(const uint8_t * p) { uint16_t v; memcpy(&v, p, sizeof v); return v; }
static inline uint32_t load_u32(const uint8_t * p) { uint32_t v; memcpy(&v, p, sizeof v); return v; }
static inline uint64_t load_u64(const uint8_t * p) { uint64_t v; memcpy(&v, p, sizeof v); return v; }
static inline int32_t  load_i32(const uint8_t * p) { int32_t  v; memcpy(&v, p, sizeof v); return v; }

static inline void store_u16(uint8_t * p, uint16_t v) { memcpy(p, &v, sizeof v); }
static inline void store_u32(uint8_t * p, uint32_t v) { memcpy(p, &v, sizeof v); }
static inline void store_u64(uint8_t * p, uint64_t v) { memcpy(p, &v, sizeof v); }
static inline void store_i32(uint8_t * p, int32_t  v) { memcpy(p, &v, sizeof v); }

#endif
