/* memcpy, memmove, memcmp and bcmp of the static binary, in place of musl's slow versions.
 * docs/decisions/0110-allocator-and-memory-functions.md explains why. build.rs compiles this file only for musl on
 * x86-64, where 16 bytes can be read and written at any address. tests/it/musl.rs compares it with
 * naive loops. */

#include <stddef.h>
#include <stdint.h>

#define ANYWHERE aligned(1), may_alias
typedef unsigned char byte;
typedef uint16_t pair __attribute__((ANYWHERE));
typedef uint32_t four __attribute__((ANYWHERE));
typedef uint64_t eight __attribute__((ANYWHERE));
typedef uint64_t sixteen __attribute__((vector_size(16), ANYWHERE));

/* From this size, the processor's own `rep movsb` is faster. */
#define REP 2048

#define GET(type, from) (*(const type *)(from))
#define PUT(type, to, value) (*(type *)(to) = (value))

/* Copies an area as long as one to two times `type`: its first and its last `type`. */
#define ENDS(type)                                                                                                    \
    do {                                                                                                              \
        type first = GET(type, from), last = GET(type, from + size - sizeof(type));                                   \
        PUT(type, to, first), PUT(type, to + size - sizeof(type), last);                                              \
    } while (0)

/* All bytes are read before any byte is written, so the areas may overlap. The pieces from both ends
 * may meet in the middle, which keeps the branches few. */
static inline void up_to_128(byte *to, const byte *from, size_t size) {
    if (size > 32) {
        const byte *end = from + size - 16;
        byte *to_end = to + size - 16;
        sixteen a = GET(sixteen, from), b = GET(sixteen, from + 16);
        sixteen y = GET(sixteen, end - 16), z = GET(sixteen, end);
        if (size > 64) {
            sixteen c = GET(sixteen, from + 32), d = GET(sixteen, from + 48);
            sixteen w = GET(sixteen, end - 48), x = GET(sixteen, end - 32);
            PUT(sixteen, to + 32, c), PUT(sixteen, to + 48, d);
            PUT(sixteen, to_end - 48, w), PUT(sixteen, to_end - 32, x);
        }
        PUT(sixteen, to, a), PUT(sixteen, to + 16, b);
        PUT(sixteen, to_end - 16, y), PUT(sixteen, to_end, z);
    } else if (size >= 16) {
        ENDS(sixteen);
    } else if (size >= 8) {
        ENDS(eight);
    } else if (size >= 4) {
        ENDS(four);
    } else if (size >= 2) {
        ENDS(pair);
    } else if (size) {
        *to = *from;
    }
}

/* Copies upwards by 64 bytes. The last 64 bytes are read before any byte is written. */
static inline void upwards(byte *to, const byte *from, size_t size) {
    const byte *end = from + size - 64;
    byte *to_end = to + size - 64;
    sixteen w = GET(sixteen, end), x = GET(sixteen, end + 16), y = GET(sixteen, end + 32), z = GET(sixteen, end + 48);
    for (; to < to_end; to += 64, from += 64) {
        sixteen a = GET(sixteen, from), b = GET(sixteen, from + 16);
        sixteen c = GET(sixteen, from + 32), d = GET(sixteen, from + 48);
        PUT(sixteen, to, a), PUT(sixteen, to + 16, b), PUT(sixteen, to + 32, c), PUT(sixteen, to + 48, d);
    }
    PUT(sixteen, to_end, w), PUT(sixteen, to_end + 16, x), PUT(sixteen, to_end + 32, y), PUT(sixteen, to_end + 48, z);
}

/* Copies downwards by 64 bytes. The first 64 bytes are read before any byte is written. */
static inline void downwards(byte *to, const byte *from, size_t size) {
    sixteen w = GET(sixteen, from), x = GET(sixteen, from + 16), y = GET(sixteen, from + 32), z = GET(sixteen, from + 48);
    for (size_t left = size; left > 64; left -= 64) {
        const byte *end = from + left - 64;
        byte *to_end = to + left - 64;
        sixteen a = GET(sixteen, end), b = GET(sixteen, end + 16), c = GET(sixteen, end + 32), d = GET(sixteen, end + 48);
        PUT(sixteen, to_end, a), PUT(sixteen, to_end + 16, b), PUT(sixteen, to_end + 32, c), PUT(sixteen, to_end + 48, d);
    }
    PUT(sixteen, to, w), PUT(sixteen, to + 16, x), PUT(sixteen, to + 32, y), PUT(sixteen, to + 48, z);
}

void *memcpy(void *restrict to, const void *restrict from, size_t size) {
    if (size <= 128) {
        up_to_128(to, from, size);
    } else if (size < REP) {
        upwards(to, from, size);
    } else {
        void *rest = to;
        __asm__ volatile("rep movsb" : "+D"(rest), "+S"(from), "+c"(size) : : "memory");
    }
    return to;
}

void *memmove(void *to, const void *from, size_t size) {
    if (size <= 128) {
        up_to_128(to, from, size);
    } else if ((uintptr_t)to - (uintptr_t)from >= size) { /* Also true if `to` is before `from`. */
        upwards(to, from, size);
    } else {
        downwards(to, from, size);
    }
    return to;
}

/* memcmp's result for two different words: the first byte is the most significant. */
static inline int order(uint64_t one, uint64_t other) {
    return __builtin_bswap64(one) < __builtin_bswap64(other) ? -1 : 1;
}

int memcmp(const void *one, const void *other, size_t size) {
    const byte *a = one, *b = other;
    if (size < 8) {
        for (; size; size--, a++, b++) {
            if (*a != *b) return *a - *b;
        }
        return 0;
    }
    const byte *last = a + size - 8, *other_last = b + size - 8;
    for (; a < last; a += 8, b += 8) {
        uint64_t x = GET(eight, a), y = GET(eight, b);
        if (x != y) return order(x, y);
    }
    uint64_t x = GET(eight, last), y = GET(eight, other_last);
    return x == y ? 0 : order(x, y);
}

int bcmp(const void *one, const void *other, size_t size) {
    return memcmp(one, other, size);
}
