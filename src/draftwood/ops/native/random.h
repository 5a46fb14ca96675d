/* Randomness as rng.py defines it: splitmix64 of a key, 52 bits in the middle of their cells. */
#pragma once

#include <math.h>
#include <stdint.h>

#define GOLDEN 0x9E3779B97F4A7C15u
#define MIX_A 0xBF58476D1CE4E5B9u
#define MIX_B 0x94D049BB133111EBu

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * MIX_A;
    x = (x ^ (x >> 27)) * MIX_B;
    return x ^ (x >> 31);
}

static inline uint64_t fold(uint64_t key, uint64_t part) { return mix((key ^ part) * GOLDEN + MIX_A); }

static inline double unit_interval(uint64_t bits) { return ((double)(int64_t)(bits >> 12) + 0.5) * 0x1p-52; }

static inline double uniform(uint64_t key) { return unit_interval(mix(key + GOLDEN)); }

/* Where a uniform number points on weights that sum to `total`; rounding must not reach the end. */
static inline double aim_at(double u, double total) { return fmin(u * total, nextafter(total, 0)); }

/* One row of single precision: `pick` with a uniform number, and the winner of `race`. */
int64_t dw_pick_row(const float *weights, int64_t count, double u);
int64_t dw_race_row(const float *weights, int64_t count, uint64_t key);
