// Instructions of a GPU that decode.cu uses, and its launch; with -DEMULATE those of emulate.h, on a CPU.
#pragma once
#ifdef EMULATE
#include "emulate.h"
#else
#include <cstdint>
typedef uint32_t u32;
#define DEV __device__ __forceinline__
#define SHARED(name) extern __shared__ __align__(128) uint8_t name[]

DEV u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Four matrices of 8 by 8 numbers of 16 bits, each row's address given by a lane; and their transposes.
DEV void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
DEV void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// Products of 16 by 32 signed and 32 by 8 unsigned bytes, and of 16 by 16 and 16 by 8 float16.
DEV void multiply_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void multiply_halves(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEV u32 high_bytes(u32 x) { return __byte_perm(x, 0, 0x4341); }  // bytes 1 and 3, each in 16 bits
DEV u32 two_halves(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEV uint4 pack(const float (&w)[4][2]) {
    return make_uint4(two_halves(w[0][0], w[0][1]), two_halves(w[1][0], w[1][1]), two_halves(w[2][0], w[2][1]),
                      two_halves(w[3][0], w[3][1]));
}
DEV float exp2_of(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEV float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEV float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

DEV bool barrier_or(bool any) { return __syncthreads_or(any); }
DEV void barrier() { __syncthreads(); }
DEV void warp_barrier() { __syncwarp(); }

DEV void copy_async(u32 to, const void *from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from)); }
DEV void end_of_copies() { asm volatile("cp.async.commit_group;"); }
template <int N> DEV void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

DEV uint4 load_shared(u32 a) {
    uint4 r;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(a));
    return r;
}
DEV void store_shared(u32 a, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
}
DEV u32 load_byte(u32 a) {
    u32 r;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(a));
    return r;
}
DEV float load_float(u32 a) {
    float r;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(a));
    return r;
}
DEV float2 load_floats(u32 a) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(a));
    return r;
}
DEV void store_float(u32 a, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x)); }

template <class Kernel, class... Arguments>
static int run(Kernel kernel, int x, int y, int z, int shared_bytes, void *stream, Arguments... arguments) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error == cudaSuccess) {
        kernel<<<dim3(x, y, z), 128, shared_bytes, (cudaStream_t)stream>>>(arguments...);
        error = cudaGetLastError();
    }
    return (int)error;
}
#endif
