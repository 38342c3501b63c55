/* Holds src/musl.c against naive loops: every size up to 300 and some beyond, at every offset of an aligned 16 bytes,
 * areas that overlap by any distance, bytes around them untouched. Ends with 1 and a line at the first that differs. */

#include <stdio.h>
#include <stdlib.h>

void *our_memcpy(void *, const void *, size_t);
void *our_memmove(void *, const void *, size_t);
int our_memcmp(const void *, const void *, size_t);
int our_bcmp(const void *, const void *, size_t);

enum { AREA = 20000, MARGIN = 400 };
static unsigned char from[AREA], to[AREA], want[AREA];

static void fill(void) {
    for (size_t i = 0; i < AREA; i++) {
        from[i] = (unsigned char)(i * 7 + i / 251 + 1);
        to[i] = want[i] = (unsigned char)(i * 13 + i / 127 + 5);
    }
}

static void same(const char *what, size_t size, long at) {
    for (size_t i = 0; i < AREA; i++) {
        if (to[i] != want[i]) {
            printf("%s of %zu bytes at %ld: byte %zu is %d, not %d\n", what, size, at, i, to[i], want[i]);
            exit(1);
        }
    }
}

static void copies(size_t size, size_t offset, size_t to_offset) {
    unsigned char *end = our_memcpy(to + MARGIN + to_offset, from + offset, size);
    for (size_t i = 0; i < size; i++) want[MARGIN + to_offset + i] = from[offset + i];
    same("memcpy", size, (long)offset);
    if (end != to + MARGIN + to_offset) exit((puts("memcpy returns where it wrote to"), 1));
}

static void moves(size_t size, long distance) {
    unsigned char moved[AREA];
    for (size_t i = 0; i < size; i++) moved[i] = want[MARGIN + i];
    for (size_t i = 0; i < size; i++) want[MARGIN + distance + (long)i] = moved[i];
    unsigned char *end = our_memmove(to + MARGIN + distance, to + MARGIN, size);
    same("memmove", size, distance);
    if (end != to + MARGIN + distance) exit((puts("memmove returns where it wrote to"), 1));
}

static int sign(int number) { return (number > 0) - (number < 0); }

static void compares(size_t size, size_t offset) {
    unsigned char *one = from + offset, *other = to + MARGIN;
    for (size_t i = 0; i < size; i++) other[i] = one[i];
    /* What lies behind is not looked at. */
    other[size] = (unsigned char)~one[size];
    if (our_memcmp(one, other, size) || our_bcmp(one, other, size)) exit((printf("memcmp: %zu equal bytes\n", size), 1));
    for (size_t i = 0; i < size; i++) {
        unsigned char was = other[i];
        for (int to_be = 0; to_be < 256; to_be += 51) {
            other[i] = (unsigned char)to_be;
            /* A later byte that says the contrary does not count. */
            unsigned char later = other[size - 1];
            if (i + 1 < size) other[size - 1] = one[i] < to_be ? 0 : 255;
            int wanted = one[i] == to_be ? -2 : one[i] < to_be ? -1 : 1;
            if (wanted != -2 && (sign(our_memcmp(one, other, size)) != wanted || !our_bcmp(one, other, size))) {
                exit((printf("memcmp of %zu bytes that differ in byte %zu\n", size, i), 1));
            }
            other[size - 1] = later;
        }
        other[i] = was;
    }
}

int main(void) {
    static const size_t longer[] = {511, 512, 513, 1023, 1600, 2047, 2048, 2049, 4096, 5000, 16384};
    for (size_t n = 0; n <= 300 + sizeof longer / sizeof *longer; n++) {
        size_t size = n <= 300 ? n : longer[n - 301];
        for (size_t offset = 0; offset < 16; offset++) {
            fill();
            copies(size, offset, (offset * 5) % 16);
        }
        for (long distance = -(long)(MARGIN - 1); distance < MARGIN; distance += n <= 300 ? 7 : 61) {
            fill();
            moves(size, distance);
        }
        fill();
        for (long distance = -17; distance <= 17; distance++) moves(size, distance);
    }
    for (size_t size = 0; size <= 90; size++) {
        for (size_t offset = 0; offset < 8; offset++) {
            fill();
            compares(size, offset);
        }
    }
    return 0;
}
