/* Density after Eq. 1, computed for one query and head at a time, in double precision. */
#include "attention_model.h"

#include "ggml-cpu.h"

#include <math.h>

static double slope(const shape * of, int head) {
    if (of->max_bias <= 0.0f) {
        return 1.0;
    }
    const int n = 1 << (int) floor(log2(of->n_head));
    return head < n ? pow(2.0, -(double) of->max_bias * (head + 1) / n)
                    : pow(2.0, -(double) of->max_bias / 2.0 * (2 * (head - n) + 1) / n);
}

/* Round a query as ggml-cpu does before it multiplies with this type of key. ggml cannot convert Q8_1 to floats; it is
 * Q8_0 with a sum. */
static void round_query(const shape * of, const float * query, float * rounded) {
    const enum ggml_type found = ggml_get_type_traits_cpu(of->type)->vec_dot_type;
    const enum ggml_type type  = found == GGML_TYPE_Q8_1 ? GGML_TYPE_Q8_0 : found;
    uint8_t *            tmp   = exact(ggml_row_size(type, of->d));
    ggml_get_type_traits_cpu(type)->from_float(query, tmp, of->d);
    if (type == GGML_TYPE_F32) {
        memcpy(rounded, tmp, sizeof(float) * (size_t) of->d);
    } else {
        ggml_get_type_traits(type)->to_float(tmp, rounded, of->d);
    }
    free(tmp);
}

static double dot(const model * m, int layer, int cell, int head, const float * query) {
    float           key[MAX_D];
    const uint8_t * from = key_at(m, layer, cell, head / (m->of.n_head / m->of.n_head_kv));
    if (m->of.type == GGML_TYPE_F32) {
        memcpy(key, from, sizeof(float) * (size_t) m->of.d);
    } else {
        ggml_get_type_traits(m->of.type)->to_float(from, key, m->of.d);
    }
    double sum = 0.0;
    for (int i = 0; i < m->of.d; ++i) {
        sum += (double) key[i] * (double) query[i];
    }
    return sum;
}

/* Add to Eq. 1's numerator and denominator a row that counts for `weight`. */
void expect_row(
    model * m, int layer, int position, int head, const float * query, const float * sinks, uint32_t weight) {
    float  rounded[MAX_D];
    double scores[N_CELLS];
    double sum = sinks ? exp((double) sinks[head]) : 0.0;
    round_query(&m->of, query, rounded);
    for (int cell = 0; cell < N_CELLS; ++cell) {
        const double bias = (double) mask_at(m, layer, cell, position, head);
        double       s    = dot(m, layer, cell, head, rounded) / sqrt(m->of.d);
        if (m->of.softcap != 0.0f) {
            s = (double) m->of.softcap * tanh(s / (double) m->of.softcap);
        }
        scores[cell] = exp(s + slope(&m->of, head) * bias);
        sum += scores[cell];
    }
    for (int cell = 0; cell < N_CELLS; ++cell) {
        const int at = m->resident[layer][cell];
        if (scores[cell] > 0.0 && at < N_POS && m->is_noted[layer][cell]) {
            m->sums[at] += weight * scores[cell] / sum;
            m->counts[at] += weight;
        }
    }
}
