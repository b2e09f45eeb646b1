// decode.cu on a CPU: a fiber a thread; where the threads of a warp or a program meet, the last to arrive computes for all.
//
// Not covered: races (fibers take turns), asynchronous copies (these are done at once), rounding of tensor cores (sums here are float32,
// one after another), approximate ex2.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>
typedef uint32_t u32;
using std::min;
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
struct Index { int x, y, z; };
#define __global__
#define __launch_bounds__(...)
#define __restrict__
#define DEV inline
#define SHARED(name) uint8_t *name = MEMORY

constexpr int THREADS = 128, LANES = 32;
static uint8_t MEMORY[256 << 10];
static Index blockIdx, gridDim;
static int current;
static struct { struct { operator int() const { return current; } } x; } threadIdx;

// Fibers.
static ucontext_t scheduler, fibers[THREADS];
static bool done[THREADS];
static std::function<void()> program;

static void start_of_fiber() {
    program();
    done[current] = true;
    swapcontext(&fibers[current], &scheduler);
}

static void run_program() {
    static std::vector<std::vector<char>> stacks(THREADS, std::vector<char>(256 << 10));
    memset(MEMORY, 0xA5, sizeof MEMORY);
    for (int i = 0; i < THREADS; i++) {
        done[i] = false;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks[i].data();
        fibers[i].uc_stack.ss_size = stacks[i].size();
        fibers[i].uc_link = nullptr;
        makecontext(&fibers[i], start_of_fiber, 0);
    }
    for (bool any = true; any;) {
        any = false;
        for (int i = 0; i < THREADS; i++)
            if (!done[i]) {
                any = true;
                current = i;
                swapcontext(&scheduler, &fibers[i]);
            }
    }
}

// Where threads meet: what each brings, and what each takes away.
struct Meeting {
    int arrived = 0;
    long round = 0;
    u32 in[THREADS][10], out[THREADS][4];
};
static Meeting of_warps[THREADS / LANES], of_all;

template <class Compute> static void meet(Meeting &m, int expected, Compute compute) {
    if (++m.arrived == expected) {
        compute(m);
        m.arrived = 0;
        m.round++;
        return;
    }
    for (long round = m.round; m.round == round;) swapcontext(&fibers[current], &scheduler);
}
#define WARP of_warps[current / LANES]

DEV u32 shared_address(const void *p) { return (u32)((const uint8_t *)p - MEMORY); }
template <class T> T at_address(u32 a) {
    T x;
    memcpy(&x, MEMORY + a, sizeof x);
    return x;
}
DEV u32 bits(float x) {
    u32 u;
    memcpy(&u, &x, 4);
    return u;
}
DEV float number(u32 u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static void load_any(u32 (&r)[4], u32 address, bool transposed) {
    const int lane = current % LANES;
    Meeting &m = WARP;
    m.in[lane][0] = address;
    meet(m, LANES, [&](Meeting &m) {
        for (int matrix = 0; matrix < 4; matrix++)
            for (int to = 0; to < LANES; to++) {
                u32 both = 0;
                for (int j = 0; j < 2; j++) {
                    const int line = to / 4, place = 2 * (to % 4) + j;
                    const int from = transposed ? place : line, column = transposed ? line : place;
                    both |= (u32)at_address<uint16_t>(m.in[matrix * 8 + from][0] + 2 * column) << (16 * j);
                }
                m.out[to][matrix] = both;
            }
    });
    for (int i = 0; i < 4; i++) r[i] = m.out[lane][i];
}
DEV void load_matrices(u32 (&r)[4], u32 address) { load_any(r, address, false); }
DEV void load_transposed(u32 (&r)[4], u32 address) { load_any(r, address, true); }

// A product of 16 rows and 8 columns: operands of all lanes, and what a lane's fragment has. `multiply` computes one number.
template <class Multiply> static void multiply_any(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Multiply multiply) {
    const int lane = current % LANES;
    Meeting &m = WARP;
    for (int i = 0; i < 4; i++) {
        m.in[lane][i] = a[i];
        m.in[lane][6 + i] = d[i];
    }
    m.in[lane][4] = b0;
    m.in[lane][5] = b1;
    meet(m, LANES, [&](Meeting &m) {
        for (int to = 0; to < LANES; to++)
            for (int i = 0; i < 4; i++) m.out[to][i] = multiply(m, to / 4 + 8 * (i / 2), 2 * (to % 4) + i % 2, m.in[to][6 + i]);
    });
    for (int i = 0; i < 4; i++) d[i] = m.out[lane][i];
}

DEV void multiply_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32 sums[4];
    memcpy(sums, d, sizeof sums);
    multiply_any(sums, a, b0, b1, [](Meeting &m, int row, int column, u32 sum) {
        int total = (int)sum;
        for (int k = 0; k < 32; k++) {
            const int quarter = k % 16 / 4, shift = 8 * (k % 4);
            const int left = (int8_t)(m.in[row % 8 * 4 + quarter][row / 8 + 2 * (k / 16)] >> shift);
            total += left * (int)(uint8_t)(m.in[column * 4 + quarter][4 + k / 16] >> shift);
        }
        return (u32)total;
    });
    memcpy(d, sums, sizeof sums);
}

static float half_at(u32 x, int i) {
    const uint16_t word = x >> (16 * i);
    _Float16 h;
    memcpy(&h, &word, 2);
    return (float)h;
}
DEV u32 two_halves(float low, float high) {
    const _Float16 both[2] = {(_Float16)low, (_Float16)high};
    u32 x;
    memcpy(&x, both, 4);
    return x;
}
DEV void multiply_halves(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u32 sums[4];
    const u32 a[4] = {a0, a1, a2, a3};
    memcpy(sums, d, sizeof sums);
    multiply_any(sums, a, b0, b1, [](Meeting &m, int row, int column, u32 sum) {
        float total = number(sum);
        for (int k = 0; k < 16; k++) {
            const int pair = k % 8 / 2;
            const float left = half_at(m.in[row % 8 * 4 + pair][row / 8 + 2 * (k / 8)], k % 2);
            total += left * half_at(m.in[column * 4 + pair][4 + k / 8], k % 2);
        }
        return bits(total);
    });
    memcpy(d, sums, sizeof sums);
}

DEV u32 high_bytes(u32 x) { return x >> 8 & 0x00ff00ffu; }
DEV uint4 pack(const float (&w)[4][2]) {
    return {two_halves(w[0][0], w[0][1]), two_halves(w[1][0], w[1][1]), two_halves(w[2][0], w[2][1]), two_halves(w[3][0], w[3][1])};
}
DEV float exp2_of(float x) { return exp2f(x); }
DEV float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DEV float shuffle_xor(float x, int mask) {
    const int lane = current % LANES;
    Meeting &m = WARP;
    m.in[lane][0] = bits(x);
    meet(m, LANES, [&](Meeting &m) {
        for (int to = 0; to < LANES; to++) m.out[to][0] = m.in[to ^ mask][0];
    });
    return number(m.out[lane][0]);
}

DEV bool barrier_or(bool any) {
    of_all.in[current][0] = any;
    meet(of_all, THREADS, [](Meeting &m) {
        u32 some = 0;
        for (int i = 0; i < THREADS; i++) some |= m.in[i][0];
        for (int i = 0; i < THREADS; i++) m.out[i][0] = some;
    });
    return of_all.out[current][0];
}
DEV void barrier() { barrier_or(false); }
DEV void warp_barrier() { meet(WARP, LANES, [](Meeting &) {}); }

DEV void copy_async(u32 to, const void *from) { memcpy(MEMORY + to, from, 16); }
DEV void end_of_copies() {}
template <int N> void wait_for_copies() {}

DEV uint4 load_shared(u32 a) { return at_address<uint4>(a); }
DEV void store_shared(u32 a, uint4 x) { memcpy(MEMORY + a, &x, 16); }
DEV u32 load_byte(u32 a) { return MEMORY[a]; }
DEV float load_float(u32 a) { return at_address<float>(a); }
DEV float2 load_floats(u32 a) { return at_address<float2>(a); }
DEV void store_float(u32 a, float x) { memcpy(MEMORY + a, &x, 4); }

template <class Kernel, class... Arguments>
static int run(Kernel kernel, int x, int y, int z, int, void *, Arguments... arguments) {
    gridDim = {x, y, z};
    program = [=] { kernel(arguments...); };
    for (blockIdx.z = 0; blockIdx.z < z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) run_program();
    return 0;
}
