/* Ranges of a suffix array: see drafters/datastore.py, which says what is computed. What the files say is not trusted:
 * no place outside the tokens is read. */
#include <stdint.h>

typedef struct {
    const int32_t *tokens, *order;
    int64_t count;
} Store;

static int64_t token_at(const Store *s, int64_t rank, int64_t offset) {
    int64_t place = (int64_t)s->order[rank] + offset;
    return s->order[rank] >= 0 && place < s->count ? s->tokens[place] : -1;
}

/* The first rank of [low, high) whose token at `offset` is not below `token`. */
static int64_t lower(const Store *s, int64_t low, int64_t high, int64_t offset, int64_t token) {
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (token_at(s, middle, offset) < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* range: [2] the ranks whose first `offset` tokens are alike; narrowed to those that go on with `token`. */
__attribute__((visibility("default"))) void dw_narrow(
    const int32_t *tokens, const int32_t *order, int64_t count, int64_t *range, int64_t offset, int64_t token) {
    Store s = {tokens, order, count};
    int64_t low = lower(&s, range[0], range[1], offset, token);
    range[1] = lower(&s, low, range[1], offset, token + 1);
    range[0] = low;
}

/* The first `most` tokens that go on the ranks [low, high) at `offset`, and how often each does. Returns how many. */
__attribute__((visibility("default"))) int64_t dw_successors(
    const int32_t *tokens, const int32_t *order, int64_t count, int64_t low, int64_t high, int64_t offset, int64_t most,
    int64_t *found, int64_t *counts) {
    Store s = {tokens, order, count};
    int64_t number = 0;
    low = lower(&s, low, high, offset, 0);
    while (low < high && number < most) {
        int64_t token = token_at(&s, low, offset);
        int64_t step = 1, next = low + 1; /* galloping: most tokens come once or twice */
        while (next < high && token_at(&s, next, offset) <= token) {
            next += step;
            step *= 2;
        }
        next = lower(&s, low + 1, next < high ? next : high, offset, token + 1);
        found[number] = token;
        counts[number] = next - low;
        number++;
        low = next;
    }
    return number;
}

/* The first rank whose next `n` tokens are not below those of `text`, or, `past` 1, not below or equal to them. */
static int64_t bound(const Store *s, const int32_t *text, int64_t n, int past) {
    int64_t low = 0, high = s->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2, k = 0, token = -1;
        while (k < n && (token = token_at(s, middle, k)) == text[k])
            k++;
        if (k == n ? past : token < text[k])
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest end of `text` [n] that begins some place, no shorter than `shortest` (0: none); range: [2] its ranks.
 * Lengths are halved: where a text begins, its ends do elsewhere. */
__attribute__((visibility("default"))) int64_t dw_longest_end(
    const int32_t *tokens, const int32_t *order, int64_t count, const int32_t *text, int64_t n, int64_t shortest,
    int64_t *range) {
    Store s = {tokens, order, count};
    int64_t low = shortest - 1, high = n, best = 0;
    range[0] = range[1] = 0;
    while (low < high) {
        int64_t length = (low + high + 1) / 2;
        int64_t first = bound(&s, text + n - length, length, 0), end = bound(&s, text + n - length, length, 1);
        if (first < end) {
            low = best = length;
            range[0] = first;
            range[1] = end;
        } else
            high = length - 1;
    }
    return best;
}
