// A decode kernel in CUDA C++: a study, timed beside Triton's on rows of the same bytes. Nothing in the product goes by it.
//
// Rows are those of rotor.checkpoint.rows: one latent a group, all nibbles, the lower nibble of byte 0 is the row's scale
// 2^((n - 8) / 2). Eight query rows (query heads that share a group) attend to them, by absorbed queries for each BLOCK positions.
//
// Byte j of a row is 16 h_j + l_j. The logits' product reads it twice as an integer of 8 bits, without unpacking: the byte as it lies,
// and the byte masked to its lower nibble (one instruction for eight nibbles). So the query of the byte is q_h / 16, that of the lower
// nibble q_l - q_h / 16, in units 16 times as large. Both are 128 hi + lo in signed bytes: rows 0 to 7 of the 16 of a product are hi,
// rows 8 to 15 lo. Sums of integers are exact. What both operands have too much (136 and 8) is in the constants.
//
// Values are multiplied in float16: a byte and a nibble are read as subnormal numbers, digits of 2^-24. Weights are relative to a
// reference, a power of two, which moves only where one would overflow; so a tile asks for no maximum.
//
// A program has four warps and takes 128 keys a tile. Each warp does logits and softmax of 32 keys; they meet at one barrier; each then
// takes a quarter of the columns of all values. Query rows are the products' rows and keys their columns, so that weights are operands
// of the second product as they stand, without shuffles.
#include "instructions.h"

#ifndef BYTES
#define BYTES 128  // of a group's row: 64, 128 or 256
#endif
constexpr int BLOCK = 64;   // positions that share an absorbed query
constexpr int KEYS = 128;   // of a tile
constexpr int WARPS = 4;
constexpr int STAGES = 3;   // tiles in shared memory
constexpr int ROWS = 8;     // query rows
constexpr int STEPS = BYTES / 32;         // products of logits over a row
constexpr int CHUNKS = BYTES / 16;        // of 16 bytes
constexpr int OWN = CHUNKS / WARPS;       // chunks of values of a warp
constexpr int WARP_KEYS = KEYS / WARPS;

constexpr float LOG_UNIT = 8.0f, UNIT = 256.0f;  // weights are in units of 1 / UNIT
constexpr float MOST = 4096.0f;                  // sum of a lane's eight weights that still fit float16 times the largest scale

// Shared memory: tiles; weights of two tiles, [tile][warp][lane] 16 bytes; scales [key]; a number of each query row and warp.
constexpr int TILE_BYTES = KEYS * BYTES;
constexpr int WEIGHTS = STAGES * TILE_BYTES, SCALES = WEIGHTS + 2 * WARPS * 512, TOPS = SCALES + KEYS * 4;
constexpr int SHARED_BYTES = TOPS + WARPS * ROWS * 4;

// Chunks of a row are stored in another order for each key, so that eight keys' chunks lie in different banks.
DEV u32 swizzle(u32 key) { return BYTES >= 128 ? key & 7 : key >> 1 & 3; }

// Tiles as they are copied, 16 bytes a thread and pass.
struct Copies {
    static constexpr int PASS = 32 * WARPS / CHUNKS;  // keys of a pass
    const uint8_t *source;
    u32 target;
    long long row_stride;

    DEV Copies(const uint8_t *rows, long long row_stride, u32 shared, int thread) : row_stride(row_stride) {
        const u32 key = thread / CHUNKS, chunk = thread % CHUNKS;
        source = rows + key * row_stride + chunk * 16;
        target = shared + key * BYTES + ((chunk ^ swizzle(key)) << 4);
    }

    DEV void start(int tile, int slot) const {
        const uint8_t *from = source + tile * KEYS * row_stride;
#pragma unroll
        for (int i = 0; i < KEYS / PASS; i++) copy_async(target + slot * TILE_BYTES + i * PASS * BYTES, from + i * PASS * row_stride);
        end_of_copies();
    }
};

// Logits of 32 keys without scale and constants, [8 keys][pair of neighbours] for the query row of a lane: sums of integers, in units of
// what `absorbed` is in.
DEV void logits_of_keys(float (&logits)[4][2], u32 tile, const uint4 *absorbed, int warp, int lane) {
    int of_bytes[4][4] = {}, of_lower[4][4] = {};
    const u32 row = tile + (warp * WARP_KEYS + (lane >> 4) * 8 + (lane & 7)) * BYTES;
    const u32 chunk = (lane >> 3 & 1) ^ swizzle(lane & 7);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const uint4 x = absorbed[step * 64 + lane], y = absorbed[step * 64 + 32 + lane];
        const u32 query_of_byte[4] = {x.x, x.y, x.z, x.w}, query_of_lower[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            u32 bytes[4];  // of 16 keys
            load_matrices(bytes, row + pair * 16 * BYTES + ((chunk << 4) ^ (step << 5)));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u32 b0 = bytes[2 * j], b1 = bytes[2 * j + 1];
                multiply_bytes(of_bytes[2 * pair + j], query_of_byte, b0, b1);
                multiply_bytes(of_lower[2 * pair + j], query_of_lower, b0 & 0x0f0f0f0fu, b1 & 0x0f0f0f0fu);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)  // rows of hi, then of lo; below 2^30
            logits[n][i] = (float)(16 * (128 * of_lower[n][i] + of_lower[n][i + 2]) + 128 * of_bytes[n][i] + of_bytes[n][i + 2]);
}

// Weighted values of a tile, this warp's columns, for the bytes and for the lower nibbles.
DEV void weigh_values(float (&sums)[OWN][2][4], u32 tile, u32 weights, int warp, int lane) {
#pragma unroll
    for (int keys = 0; keys < WARPS; keys++) {
        const uint4 w = load_shared(weights + keys * 512 + lane * 16);
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            u32 words[4];
            load_transposed(words, tile + (keys * WARP_KEYS + lane) * BYTES + (((warp * OWN + own) ^ swizzle(lane & 7)) << 4));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 x0 = words[2 * half], x1 = words[2 * half + 1], y0 = high_bytes(x0), y1 = high_bytes(x1);
                const u32 w0 = half ? w.z : w.x, w1 = half ? w.w : w.y;
                multiply_halves(sums[own][0], x0 & 0x00ff00ffu, y0, x1 & 0x00ff00ffu, y1, w0, w1);
                multiply_halves(sums[own][1], x0 & 0x000f000fu, y0 & 0x000f000fu, x1 & 0x000f000fu, y1 & 0x000f000fu, w0, w1);
            }
        }
    }
}

// Attend to some tiles of each (sequence, group). Grid: slices, groups, sequences; a sequence has a multiple of KEYS keys.
//
// rows: of the first group, one token behind another by row_stride, one sequence by sequence_stride bytes.
// absorbed: [sequences, blocks, groups, STEPS, byte or lower nibble, 32 lanes], 16 bytes each. constants: [sequences, blocks, groups,
//   ROWS]: unit of the logits' sums, what a key's scale multiplies, what is added.
// values: [sequences, groups, slices, ROWS, byte or lower nibble, BYTES]. sums: [sequences, groups, slices, WARPS, ROWS, 4]: of weights,
//   of weights times scales (of the warp's keys both), and the reference.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
nibble_decode(const uint8_t *__restrict__ rows, long long row_stride, long long sequence_stride, const uint4 *__restrict__ absorbed,
              const float4 *__restrict__ constants, float *__restrict__ values, float *__restrict__ sums, int keys, int slice_tiles) {
    SHARED(shared_memory);
    const u32 shared = shared_address(shared_memory);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, row = lane >> 2, column = lane & 3;
    const int slice = blockIdx.x, group = blockIdx.y, groups = gridDim.y, sequence = blockIdx.z;
    const int blocks = (keys + BLOCK - 1) / BLOCK, first = slice * slice_tiles, last = min(keys / KEYS, first + slice_tiles) - 1;
    const Copies copies(rows + sequence * sequence_stride + group * BYTES, row_stride, shared, thread);
    absorbed += ((long long)sequence * blocks * groups + group) * (STEPS * 64);
    constants += ((long long)sequence * blocks * groups + group) * ROWS;

    copies.start(first, 0);
    copies.start(min(first + 1, last), 1);
    wait_for_copies<1>();
    barrier();

    float weighted[OWN][2][4] = {}, scaled_weights[4] = {}, sum = 0.0f, reference = -LOG_UNIT;
    int slot = 0;
    for (int tile = first; tile <= last; tile++) {
        const u32 at = shared + slot * TILE_BYTES;
        const int block = (tile * KEYS + warp * WARP_KEYS) / BLOCK * groups;

        // The scale of a key of this warp's to each lane.
        const u32 key = warp * WARP_KEYS + lane;
        const u32 nibble = load_byte(at + key * BYTES + (swizzle(key) << 4)) & 15;
        store_float(shared + SCALES + key * 4, exp2_of(0.5f * ((float)nibble - 8.0f)));
        warp_barrier();

        // Weights of the lane's query row and eight keys, relative to the reference.
        float logits[4][2], scales[4][2], weights[4][2], tile_sum = 0.0f;
        logits_of_keys(logits, at, absorbed + (long long)block * (STEPS * 64), warp, lane);
        const float4 constant = constants[block * ROWS + row];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float2 both = load_floats(shared + SCALES + (warp * WARP_KEYS + n * 8 + 2 * column) * 4);
            scales[n][0] = both.x;
            scales[n][1] = both.y;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float own = multiply_add(logits[n][i], constant.x, constant.y);
                logits[n][i] = multiply_add(own, scales[n][i], constant.z - reference);
                const float weight = exp2_of(logits[n][i]);
                tile_sum += weight;
                weights[n][i] = weight * scales[n][i];
            }
        }
        uint4 packed = pack(weights);
        const u32 shared_weights = shared + WEIGHTS + (tile & 1) * (WARPS * 512);
        store_shared(shared_weights + warp * 512 + lane * 16, packed);
        wait_for_copies<0>();  // of the next tile, which began a tile ago
        if (barrier_or(tile_sum > MOST || tile == first)) {
            // Rare: the first tile, or a weight beyond float16. A higher reference is taken, and all sums are moved to it.
            float top = -1e30f;
            for (int n = 0; n < 4; n++)
                for (int i = 0; i < 2; i++) top = fmaxf(top, logits[n][i] + log2f(scales[n][i]));
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            if (column == 0) store_float(shared + TOPS + (warp * ROWS + row) * 4, top);
            barrier();
            for (int i = 0; i < WARPS; i++) top = fmaxf(top, load_float(shared + TOPS + (i * ROWS + row) * 4));
            const float by = fmaxf(tile == first ? -1024.0f : 0.0f, ceilf(top - LOG_UNIT)), shrink = exp2_of(-by);
            sum *= shrink;
            reference += by;
            barrier();
            if (warp == 0 && column == 0) store_float(shared + TOPS + row * 4, shrink);
            barrier();
            for (int i = 0; i < 4; i++) {  // in the second product query rows are columns
                const float of_row = load_float(shared + TOPS + (2 * column + i % 2) * 4);
                for (int own = 0; own < OWN; own++)
                    for (int operand = 0; operand < 2; operand++) weighted[own][operand][i] *= of_row;
                scaled_weights[i] *= of_row;
            }
            tile_sum = 0.0f;
            for (int n = 0; n < 4; n++)
                for (int i = 0; i < 2; i++) {
                    const float weight = exp2_of(logits[n][i] - by);
                    tile_sum += weight;
                    weights[n][i] = weight * scales[n][i];
                }
            packed = pack(weights);
            store_shared(shared_weights + warp * 512 + lane * 16, packed);
            barrier();
        }
        sum += tile_sum;
        const u32 one = 0x3c003c00u;
        multiply_halves(scaled_weights, one, one, one, one, packed.x, packed.y);
        multiply_halves(scaled_weights, one, one, one, one, packed.z, packed.w);

        copies.start(min(tile + 2, last), slot == 0 ? 2 : slot - 1);
        weigh_values(weighted, at, shared_weights, warp, lane);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }

    const long long result = ((long long)sequence * groups + group) * gridDim.x + slice;
    values += result * (ROWS * 2 * BYTES);
    for (int own = 0; own < OWN; own++)
        for (int operand = 0; operand < 2; operand++)
            for (int i = 0; i < 4; i++)
                values[((2 * column + i % 2) * 2 + operand) * BYTES + (warp * OWN + own) * 16 + 2 * row + i / 2] =
                    weighted[own][operand][i] * (16777216.0f / UNIT);  // digits are of 2^-24
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    sums += (result * WARPS + warp) * (ROWS * 4);
    if (column == 0) {
        sums[row * 4] = sum / UNIT;
        sums[row * 4 + 2] = reference + LOG_UNIT;
    }
    if (row == 0)
        for (int i = 0; i < 2; i++) sums[(2 * column + i) * 4 + 1] = scaled_weights[i] / UNIT;
}

// Launch it; returns CUDA's error, 0 for none.
extern "C" int launch(const uint8_t *rows, long long row_stride, long long sequence_stride, const uint4 *absorbed, const float4 *constants,
                      float *values, float *sums, int keys, int slice_tiles, int slices, int groups, int sequences, void *stream) {
    return run(nibble_decode, slices, groups, sequences, SHARED_BYTES, stream, rows, row_stride, sequence_stride, absorbed, constants, values,
               sums, keys, slice_tiles);
}
