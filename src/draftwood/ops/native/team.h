/* Threads that run the same code over shares of the same work.

   Inside one OpenMP region (torch's own runtime and threads: two teams would fight for the cores), but with a barrier of
   our own: there are hundreds in a forward, and one that gives its core away after a while survives a busy machine. */
#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#define PATIENCE 20000 /* looks at the barrier before the core is offered to other processes */

/* What a team shares, in zeroed memory of 64 bytes for itself and 64 for every thread. */
typedef struct {
    _Atomic int64_t arrived, round;
    int64_t apart[6];
    struct {
        _Atomic int64_t taken; /* of this thread's part of a loop, by whomever */
        int64_t apart[7];
    } parts[];
} Barrier;

typedef struct {
    int64_t index, size;
    Barrier *barrier;
} Team;

/* No thread goes on before all have arrived. */
static inline void meet(const Team *team) {
    Barrier *b = team->barrier;
    const int64_t round = atomic_load_explicit(&b->round, memory_order_acquire);
    if (atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) + 1 == team->size) {
        atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
        for (int64_t i = 0; i < team->size; i++) atomic_store_explicit(&b->parts[i].taken, 0, memory_order_relaxed);
        atomic_store_explicit(&b->round, round + 1, memory_order_release);
        return;
    }
    for (int64_t looks = 0; atomic_load_explicit(&b->round, memory_order_acquire) == round; looks++) {
        if (looks >= PATIENCE) sched_yield();
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
}

/* The next of `count` things for this thread, or -1: first its own part from end to end, then what others have not got
   to yet. `helped` counts the threads it is done with; at most one such loop between two barriers. */
static inline int64_t take(const Team *team, int64_t count, int64_t *helped) {
    for (; *helped < team->size; ++*helped) {
        const int64_t whose = (team->index + *helped) % team->size;
        const int64_t first = count * whose / team->size, end = count * (whose + 1) / team->size;
        const int64_t item = first + atomic_fetch_add_explicit(&team->barrier->parts[whose].taken, 1, memory_order_relaxed);
        if (item < end) return item;
    }
    return -1;
}

/* This thread's part of `count` things. */
#define SHARE(team, i, count) \
    for (int64_t i = (count) * (team)->index / (team)->size, i##_end = (count) * ((team)->index + 1) / (team)->size; \
         i < i##_end; i++)
