/* The weight table itself, for the files that make it: weights.c, and weights_claims.c for what is entered before a graph. */
#ifndef LLMAAS_WEIGHTS_TABLE_H
#define LLMAAS_WEIGHTS_TABLE_H

#include "weights.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

/* A model file that weights are read from. */
struct llmaas_weights_file {
    char *      path;
    int         fd;
    struct stat state; /* when it was opened */
};

/* An operand whose channels weights have. */
struct llmaas_weights_operand {
    llmaas_operand * channels;
    uint32_t         n_bytes; /* of a channel */
};

struct llmaas_weights {
    atomic_uint      n_holders;
    pthread_rwlock_t lock;
    llmaas_weight ** entries;
    size_t           n_entries;
    size_t           n_capacity;
    llmaas_weight ** slots; /* open addressing by tensor; n_slots is a power of two, at most half full */
    size_t           n_slots;
    uint32_t         n_narrow[LLMAAS_MAX_LEVELS]; /* weights that are not all, or biased, by level */
    _Atomic uint64_t narrow_levels; /* bit l: there are some at level l */
    bool             own_buffers;
    struct llmaas_weights_file * files;
    size_t           n_files;
    atomic_bool      has_changed; /* some file has, since it was opened */
    llmaas_stream *  stream;
    struct llmaas_weights_operand * operands;
    size_t           n_operands, operands_capacity;
    char             problem[192];
};

/* The entry of this name; NULL: there is none. Under the lock, as all of these. */
llmaas_weight * llmaas_weights_by_name(const llmaas_weights * weights, const char * name);
/* Made if there is none; NULL: memory, or a name no tensor can have. */
llmaas_weight * llmaas_weights_entry(llmaas_weights * weights, const char * name);

#endif
