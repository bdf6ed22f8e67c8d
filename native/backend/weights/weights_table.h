/* The weight table's internals, for the files that implement it: weights.c, and weights_claims.c for the claims made
 * before a graph. */
#ifndef LLMAAS_WEIGHTS_TABLE_H
#define LLMAAS_WEIGHTS_TABLE_H

#include "base/fork_lock.h"
#include "weights/weights.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

/* A model file that weights are read from. */
struct llmaas_weights_file {
    char *      path;
    int         fd;
    struct stat state; /* at the time it was opened */
};

/* An operand whose channels contain columns of weights. */
struct llmaas_weights_operand {
    llmaas_operand * channels;
    uint32_t         n_bytes; /* bytes of a channel */
};

struct llmaas_weights {
    atomic_uint      n_holders;
    pthread_rwlock_t lock;     /* read-locked while a graph is computed; forks do not wait for it */
    llmaas_fork_lock changing; /* also held while something changes, so that a forked child finds a change either
                                * complete or not begun */
    llmaas_weight ** entries;
    size_t           n_entries;
    size_t           n_capacity;
    llmaas_weight ** slots; /* open addressing by tensor; n_slots is a power of two, at most half full */
    size_t           n_slots;
    uint32_t         n_changed[LLMAAS_MAX_LEVELS]; /* by level: weights whose products are not plain */
    _Atomic uint64_t changed_levels; /* bit l: there are such weights at level l */
    bool             own_buffers;
    struct llmaas_weights_file * files;
    size_t           n_files;
    atomic_bool      has_changed; /* some file changed since it was opened */
    llmaas_stream *  stream;
    struct llmaas_weights_operand * operands;
    size_t           n_operands, operands_capacity;
    char             problem[192];
};

/* Begin or end a change of entries, or of anything else the lock guards. Waits until no graph is being computed. */
void llmaas_weights_begin_change(llmaas_weights * weights);
void llmaas_weights_end_change(llmaas_weights * weights);

/* Update the counts of weights whose products are not plain. Call after a change of the weight's claims. */
void llmaas_weights_count_changed(llmaas_weights * weights, llmaas_weight * weight);

/* Return the entry of this name, or NULL. Requires the lock, like all functions here. */
llmaas_weight * llmaas_weights_by_name(const llmaas_weights * weights, const char * name);
/* Return the entry of this name; create it if needed. NULL if out of memory, or if no tensor can have this name. */
llmaas_weight * llmaas_weights_entry(llmaas_weights * weights, const char * name);

#endif
