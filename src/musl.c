/* What the static binary copies and compares memory with. musl's memcpy starts a `rep movs` whatever the size and its
 * memcmp goes byte by byte; a request makes some 150 copies, most of a few dozen bytes. docs/PERFORMANCE.md has what this
 * saves. build.rs compiles it for musl on x86-64 only, and the linker finds these before the C library's; there, 16 bytes
 * can be read and written at any address. tests/it/musl.rs holds it against naive loops.
 *
 * Up to 128 bytes all is read before anything is written, from both ends towards the middle, where the pieces may meet:
 * few branches, and areas may overlap. Longer areas go by 64 bytes, and from REP on by the processor's own loop. */

#include <stddef.h>
#include <stdint.h>

#define ANYWHERE aligned(1), may_alias
typedef unsigned char byte;
typedef uint16_t pair __attribute__((ANYWHERE));
typedef uint32_t four __attribute__((ANYWHERE));
typedef uint64_t eight __attribute__((ANYWHERE));
typedef uint64_t sixteen __attribute__((vector_size(16), ANYWHERE));

#define REP 2048

#define GET(type, from) (*(const type *)(from))
#define PUT(type, to, value) (*(type *)(to) = (value))

/* Both ends of an area that is at least as long as one `type` and at most as long as two. */
#define ENDS(type)                                                                                                    \
    do {                                                                                                              \
        type first = GET(type, from), last = GET(type, from + size - sizeof(type));                                   \
        PUT(type, to, first), PUT(type, to + size - sizeof(type), last);                                              \
    } while (0)

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

/* From the first byte to the last; the last 64 are read before anything is written. */
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

/* From the last byte to the first; the first 64 are read before anything is written. */
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
    } else if ((uintptr_t)to - (uintptr_t)from >= size) { /* Also if `to` lies before `from`. */
        upwards(to, from, size);
    } else {
        downwards(to, from, size);
    }
    return to;
}

/* What memcmp says of two words that differ, the first byte counting most. */
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
