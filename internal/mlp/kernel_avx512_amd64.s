// SPDX-License-Identifier: Apache-2.0
#include "textflag.h"
#include "go_asm.h"

// AVX-512 micro-kernels: one function per row count, 1 to 14 rows by 32 columns.
//
//	           column 0..15   column 16..31
//	  row 0        Z0             Z1
//	  row 1        Z2             Z3          28 accumulators at most
//	   ...
//	  row 13       Z26            Z27
//
//	  Z28, Z29: the 32 weights of this k      Z30: one input, in all lanes
//
// 14 is what the 32 registers allow. From about 5 rows on, the two FMA units
// are the limit (10 chains hide the latency of 4 cycles); below that, memory is.
//
// Registers: AX the tile · SI, R9, R10 inputs of rows 0, 5, 10 · DX row stride,
// R8 three times that · DI weights · R12 prefetch, R13 its step · CX steps left
// R11 column offset · BX row table, then the second prefetch · R14, R15 and BP stay untouched.

#define ROW(addr, c0, c1) VBROADCASTSS addr, Z30; VFMADD231PS Z30, Z28, c0; VFMADD231PS Z30, Z29, c1

// ROWSn(d): the first n rows at input displacement d, each built on the one before.
#define ROWS1(d) ROW(d(SI), Z0, Z1)
#define ROWS2(d) ROWS1(d); ROW(d(SI)(DX*1), Z2, Z3)
#define ROWS3(d) ROWS2(d); ROW(d(SI)(DX*2), Z4, Z5)
#define ROWS4(d) ROWS3(d); ROW(d(SI)(R8*1), Z6, Z7)
#define ROWS5(d) ROWS4(d); ROW(d(SI)(DX*4), Z8, Z9)
#define ROWS6(d) ROWS5(d); ROW(d(R9), Z10, Z11)
#define ROWS7(d) ROWS6(d); ROW(d(R9)(DX*1), Z12, Z13)
#define ROWS8(d) ROWS7(d); ROW(d(R9)(DX*2), Z14, Z15)
#define ROWS9(d) ROWS8(d); ROW(d(R9)(R8*1), Z16, Z17)
#define ROWS10(d) ROWS9(d); ROW(d(R9)(DX*4), Z18, Z19)
#define ROWS11(d) ROWS10(d); ROW(d(R10), Z20, Z21)
#define ROWS12(d) ROWS11(d); ROW(d(R10)(DX*1), Z22, Z23)
#define ROWS13(d) ROWS12(d); ROW(d(R10)(DX*2), Z24, Z25)
#define ROWS14(d) ROWS13(d); ROW(d(R10)(R8*1), Z26, Z27)

// Sums come from one table of row pointers and go to another.
#define LOAD(at, c0, c1) MOVQ at(BX), CX; VMOVUPS (CX)(R11*1), c0; VMOVUPS 64(CX)(R11*1), c1
#define LOAD1 LOAD(0, Z0, Z1)
#define LOAD2 LOAD1; LOAD(8, Z2, Z3)
#define LOAD3 LOAD2; LOAD(16, Z4, Z5)
#define LOAD4 LOAD3; LOAD(24, Z6, Z7)
#define LOAD5 LOAD4; LOAD(32, Z8, Z9)
#define LOAD6 LOAD5; LOAD(40, Z10, Z11)
#define LOAD7 LOAD6; LOAD(48, Z12, Z13)
#define LOAD8 LOAD7; LOAD(56, Z14, Z15)
#define LOAD9 LOAD8; LOAD(64, Z16, Z17)
#define LOAD10 LOAD9; LOAD(72, Z18, Z19)
#define LOAD11 LOAD10; LOAD(80, Z20, Z21)
#define LOAD12 LOAD11; LOAD(88, Z22, Z23)
#define LOAD13 LOAD12; LOAD(96, Z24, Z25)
#define LOAD14 LOAD13; LOAD(104, Z26, Z27)

// Z28 holds the floor here: 0 for ReLU, -Inf for none. VMAXPS returns its last
// source (in Go's order the first) when one is NaN, so a NaN stays visible.
#define STORE(at, c0, c1) MOVQ at(BX), CX; VMAXPS c0, Z28, c0; VMAXPS c1, Z28, c1; VMOVUPS c0, (CX)(R11*1); VMOVUPS c1, 64(CX)(R11*1)
#define STORE1 STORE(0, Z0, Z1)
#define STORE2 STORE1; STORE(8, Z2, Z3)
#define STORE3 STORE2; STORE(16, Z4, Z5)
#define STORE4 STORE3; STORE(24, Z6, Z7)
#define STORE5 STORE4; STORE(32, Z8, Z9)
#define STORE6 STORE5; STORE(40, Z10, Z11)
#define STORE7 STORE6; STORE(48, Z12, Z13)
#define STORE8 STORE7; STORE(56, Z14, Z15)
#define STORE9 STORE8; STORE(64, Z16, Z17)
#define STORE10 STORE9; STORE(72, Z18, Z19)
#define STORE11 STORE10; STORE(80, Z20, Z21)
#define STORE12 STORE11; STORE(88, Z22, Z23)
#define STORE13 STORE12; STORE(96, Z24, Z25)
#define STORE14 STORE13; STORE(104, Z26, Z27)

#define STEP(rows, ad, bd) \
	VMOVUPS    bd(DI), Z28;   \
	VMOVUPS    bd+64(DI), Z29; \
	PREFETCHT1 (R12);         \
	PREFETCHT1 (R12)(BX*1);   \
	ADDQ       R13, R12;      \
	rows(ad)

#define KERNEL(loads, rows, stores) \
	MOVQ         t+0(FP), AX;            \
	MOVQ         tile_off(AX), R11;      \
	MOVQ         tile_cin(AX), BX;       \
	loads;                               \
	MOVQ         tile_a(AX), SI;         \
	MOVQ         tile_lda(AX), DX;       \
	LEAQ         (DX)(DX*2), R8;         \
	LEAQ         (SI)(DX*4), R9;         \
	ADDQ         DX, R9;                 \
	LEAQ         (R9)(DX*4), R10;        \
	ADDQ         DX, R10;                \
	MOVQ         tile_b(AX), DI;         \
	MOVQ         tile_prefetch(AX), R12; \
	ADDQ         DI, R12;                \
	MOVQ         tile_step(AX), R13;     \
	MOVQ         tile_second(AX), BX;    \
	MOVQ         tile_k(AX), CX;         \
loop:                                    \
	STEP(rows, 0, 0);                    \
	STEP(rows, 4, 128);                  \
	STEP(rows, 8, 256);                  \
	STEP(rows, 12, 384);                 \
	ADDQ         $16, SI;                \
	ADDQ         $16, R9;                \
	ADDQ         $16, R10;               \
	ADDQ         $512, DI;               \
	SUBQ         $4, CX;                 \
	JNZ          loop;                   \
	MOVQ         tile_cout(AX), BX;      \
	VBROADCASTSS tile_floor(AX), Z28;    \
	stores;                              \
	VZEROUPPER;                          \
	RET

TEXT ·avx512x1(SB), NOSPLIT, $0-8
	KERNEL(LOAD1, ROWS1, STORE1)

TEXT ·avx512x2(SB), NOSPLIT, $0-8
	KERNEL(LOAD2, ROWS2, STORE2)

TEXT ·avx512x3(SB), NOSPLIT, $0-8
	KERNEL(LOAD3, ROWS3, STORE3)

TEXT ·avx512x4(SB), NOSPLIT, $0-8
	KERNEL(LOAD4, ROWS4, STORE4)

TEXT ·avx512x5(SB), NOSPLIT, $0-8
	KERNEL(LOAD5, ROWS5, STORE5)

TEXT ·avx512x6(SB), NOSPLIT, $0-8
	KERNEL(LOAD6, ROWS6, STORE6)

TEXT ·avx512x7(SB), NOSPLIT, $0-8
	KERNEL(LOAD7, ROWS7, STORE7)

TEXT ·avx512x8(SB), NOSPLIT, $0-8
	KERNEL(LOAD8, ROWS8, STORE8)

TEXT ·avx512x9(SB), NOSPLIT, $0-8
	KERNEL(LOAD9, ROWS9, STORE9)

TEXT ·avx512x10(SB), NOSPLIT, $0-8
	KERNEL(LOAD10, ROWS10, STORE10)

TEXT ·avx512x11(SB), NOSPLIT, $0-8
	KERNEL(LOAD11, ROWS11, STORE11)

TEXT ·avx512x12(SB), NOSPLIT, $0-8
	KERNEL(LOAD12, ROWS12, STORE12)

TEXT ·avx512x13(SB), NOSPLIT, $0-8
	KERNEL(LOAD13, ROWS13, STORE13)

TEXT ·avx512x14(SB), NOSPLIT, $0-8
	KERNEL(LOAD14, ROWS14, STORE14)
