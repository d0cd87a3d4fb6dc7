/* A cuBLASLt that multiplies nothing: it writes down what it was asked. Attribute numbers and sizes are the caller's own words,
 * as the real library got them. Algorithm 99 and tile 77 do not exist; stages 55 are a bit that no attribute sets. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char text[1 << 16];
static size_t used;
static void say(const char* form, ...) {
  va_list args;
  va_start(args, form);
  used += (size_t)vsnprintf(text + used, sizeof text - used, form, args);
  va_end(args);
}
const char* fake_text(void) { used = 0; return text; }

typedef struct { uint64_t data[8]; } Algo;
typedef struct { Algo algo; size_t workspace; int state; float waves; int reserved[4]; } Result;
typedef struct { char name; } Object;

static int made(void** object, char name) {
  *object = malloc(sizeof(Object));
  ((Object*)*object)->name = name;
  return 0;
}
static int gone(void* object) { say("-%c\n", ((Object*)object)->name); free(object); return 0; }
static int set(void* object, int attribute, const void* value, size_t size) {
  uint64_t number = 0;
  memcpy(&number, value, size);
  say("%c%d=%llu/%zu\n", ((Object*)object)->name, attribute, (unsigned long long)number, size);
  return 0;
}

size_t cublasLtGetVersion(void) { return 130101; }
const char* cublasLtGetStatusName(int status) { return status == 15 ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_OTHER"; }
int cublasLtCreate(void** handle) { say("create\n"); *handle = text; return 0; }
int cublasLtMatmulDescCreate(void** o, int compute, int scale) { say("O %d %d\n", compute, scale); return made(o, 'O'); }
int cublasLtMatmulDescDestroy(void* o) { return gone(o); }
int cublasLtMatmulDescSetAttribute(void* o, int a, const void* v, size_t n) { return set(o, a, v, n); }
int cublasLtMatrixLayoutCreate(void** o, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  say("L %d %d x %d by %d\n", type, (int)rows, (int)columns, (int)leading);
  return made(o, 'L');
}
int cublasLtMatrixLayoutDestroy(void* o) { return gone(o); }
int cublasLtMatrixLayoutSetAttribute(void* o, int a, const void* v, size_t n) { return set(o, a, v, n); }
int cublasLtMatmulPreferenceCreate(void** o) { return made(o, 'P'); }
int cublasLtMatmulPreferenceDestroy(void* o) { return gone(o); }
int cublasLtMatmulPreferenceSetAttribute(void* o, int a, const void* v, size_t n) { return set(o, a, v, n); }
int cublasLtMatmulAlgoInit(void* h, int compute, int scale, int a, int b, int c, int d, int id, Algo* algo) {
  say("init %d %d %d %d %d %d %d\n", compute, scale, a, b, c, d, id);
  memset(algo, 0, sizeof *algo);
  algo->data[0] = (uint64_t)id;
  return id == 99 ? 15 : 0;
}
int cublasLtMatmulAlgoConfigSetAttribute(Algo* algo, int a, const void* v, size_t n) {
  if (a == 0 || n != (a < 7 ? 4u : 2u)) return 7;
  memcpy((char*)algo + 4 * a, v, n);
  return 0;
}
int cublasLtMatmulAlgoConfigGetAttribute(const Algo* algo, int a, void* v, size_t n, size_t* written) {
  if (n != (a < 7 ? 4u : 2u)) return 7;
  memcpy(v, (const char*)algo + 4 * a, n);
  *written = n;
  return 0;
}
static int number(const Algo* algo, int a) { return ((const int*)algo)[a]; }
int cublasLtMatmulAlgoCheck(void* h, void* o, void* a, void* b, void* c, void* d, const Algo* algo, Result* result) {
  result->state = 0;
  result->workspace = (size_t)number(algo, 2) * 1000;
  return number(algo, 1) == 77 ? 15 : 0;
}
int cublasLtMatmulAlgoGetHeuristic(void* h, void* o, void* a, void* b, void* c, void* d, void* p, int most, Result* found,
                                   int* count) {
  const int tiles[] = {20, 77, 23, 24};
  for (*count = 0; *count < most && *count < 4; ++*count) {
    Result* r = &found[*count];
    memset(r, 0, sizeof *r);
    ((int*)&r->algo)[0] = 66, ((int*)&r->algo)[1] = tiles[*count], ((int*)&r->algo)[2] = 1 + *count, ((int*)&r->algo)[3] = 2;
    if (*count == 2) r->algo.data[7] = 1;
    if (*count == 3) r->state = 15;
    r->waves = 0.5f;
  }
  return 0;
}
int cublasLtMatmul(void* h, void* o, const void* alpha, const void* a, void* la, const void* b, void* lb, const void* beta,
                   const void* c, void* lc, void* d, void* ld, const Algo* algo, void* room, size_t size, void* stream) {
  say("matmul %g %g %p %p %p %p room %p %zu stream %p algo", *(const float*)alpha, *(const float*)beta, a, b, c, d, room, size,
      stream);
  for (int i = 0; i < 9; ++i) say(" %d", number(algo, i));
  say("\n");
  return *(const float*)alpha == 13 ? 15 : 0;
}
