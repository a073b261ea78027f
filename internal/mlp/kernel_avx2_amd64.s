// SPDX-License-Identifier: Apache-2.0
#include "textflag.h"
#include "go_asm.h"

// AVX2+FMA micro-kernels: one function per row count, 1 to 6 rows by 16 columns.
//
//	           column 0..7    column 8..15
//	  row 0        Y0             Y1
//	   ...
//	  row 5        Y10            Y11         12 accumulators at most
//
//	  Y12, Y13: the 16 weights of this k      Y14: one input, in all lanes
//
// Registers: AX the tile · SI, R9 inputs of rows 0, 5 · DX row stride, R8 three times that · DI weights
// R12 prefetch, R13 its step · CX steps left · R11 column offset · BX row table · R14, R15 and BP stay untouched.

#define ROW(addr, c0, c1) VBROADCASTSS addr, Y14; VFMADD231PS Y14, Y12, c0; VFMADD231PS Y14, Y13, c1

#define ROWS1(d) ROW(d(SI), Y0, Y1)
#define ROWS2(d) ROWS1(d); ROW(d(SI)(DX*1), Y2, Y3)
#define ROWS3(d) ROWS2(d); ROW(d(SI)(DX*2), Y4, Y5)
#define ROWS4(d) ROWS3(d); ROW(d(SI)(R8*1), Y6, Y7)
#define ROWS5(d) ROWS4(d); ROW(d(SI)(DX*4), Y8, Y9)
#define ROWS6(d) ROWS5(d); ROW(d(R9), Y10, Y11)

#define LOAD(at, c0, c1) MOVQ at(BX), CX; VMOVUPS (CX)(R11*1), c0; VMOVUPS 32(CX)(R11*1), c1
#define LOAD1 LOAD(0, Y0, Y1)
#define LOAD2 LOAD1; LOAD(8, Y2, Y3)
#define LOAD3 LOAD2; LOAD(16, Y4, Y5)
#define LOAD4 LOAD3; LOAD(24, Y6, Y7)
#define LOAD5 LOAD4; LOAD(32, Y8, Y9)
#define LOAD6 LOAD5; LOAD(40, Y10, Y11)

// Y12 holds the floor here: 0 for ReLU, -Inf for none; a NaN stays a NaN.
#define STORE(at, c0, c1) MOVQ at(BX), CX; VMAXPS c0, Y12, c0; VMAXPS c1, Y12, c1; VMOVUPS c0, (CX)(R11*1); VMOVUPS c1, 32(CX)(R11*1)
#define STORE1 STORE(0, Y0, Y1)
#define STORE2 STORE1; STORE(8, Y2, Y3)
#define STORE3 STORE2; STORE(16, Y4, Y5)
#define STORE4 STORE3; STORE(24, Y6, Y7)
#define STORE5 STORE4; STORE(32, Y8, Y9)
#define STORE6 STORE5; STORE(40, Y10, Y11)

#define STEP(rows, ad, bd) \
	VMOVUPS    bd(DI), Y12;   \
	VMOVUPS    bd+32(DI), Y13; \
	PREFETCHT1 (R12);         \
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
	MOVQ         tile_b(AX), DI;         \
	MOVQ         tile_prefetch(AX), R12; \
	ADDQ         DI, R12;                \
	MOVQ         tile_step(AX), R13;     \
	MOVQ         tile_k(AX), CX;         \
loop:                                    \
	STEP(rows, 0, 0);                    \
	STEP(rows, 4, 64);                   \
	STEP(rows, 8, 128);                  \
	STEP(rows, 12, 192);                 \
	ADDQ         $16, SI;                \
	ADDQ         $16, R9;                \
	ADDQ         $256, DI;               \
	SUBQ         $4, CX;                 \
	JNZ          loop;                   \
	MOVQ         tile_cout(AX), BX;      \
	VBROADCASTSS tile_floor(AX), Y12;    \
	stores;                              \
	VZEROUPPER;                          \
	RET

TEXT ·avx2x1(SB), NOSPLIT, $0-8
	KERNEL(LOAD1, ROWS1, STORE1)

TEXT ·avx2x2(SB), NOSPLIT, $0-8
	KERNEL(LOAD2, ROWS2, STORE2)

TEXT ·avx2x3(SB), NOSPLIT, $0-8
	KERNEL(LOAD3, ROWS3, STORE3)

TEXT ·avx2x4(SB), NOSPLIT, $0-8
	KERNEL(LOAD4, ROWS4, STORE4)

TEXT ·avx2x5(SB), NOSPLIT, $0-8
	KERNEL(LOAD5, ROWS5, STORE5)

TEXT ·avx2x6(SB), NOSPLIT, $0-8
	KERNEL(LOAD6, ROWS6, STORE6)
