/* Parts: which rows and columns of a weight are used. */
#include "weights/weights.h"

static int64_t at(const llmaas_weight * weight, uint32_t level, int64_t all) {
    const int64_t extent = weight->extents[level < weight->n_levels ? level : weight->n_levels - 1];
    return extent < 0 ? all : extent;
}

static void rows_extent(const llmaas_weight * weight, uint32_t level, int64_t * n_rows, int64_t * n_columns) {
    *n_rows = at(weight, level, *n_rows);
    (void) n_columns;
}

static void columns_extent(const llmaas_weight * weight, uint32_t level, int64_t * n_rows, int64_t * n_columns) {
    *n_columns = at(weight, level, *n_columns);
    (void) n_rows;
}

const llmaas_part_ops llmaas_part_rows    = {.extent = rows_extent};
const llmaas_part_ops llmaas_part_columns = {.extent = columns_extent};
