// One decode step of attention over a clustered KV cache, on the CPU.
//
// A slot of the cache holds a key, a value and a degree n, the number of tokens it stands for. A query gives
// it the weight n * exp(q.k * scale - max), which is softmax(q.k * scale + log n) without the logarithm. Three
// things vary. Scores may be capped. A query head may have a sink, a logit that takes part in the softmax and has
// no value. And the cache of a layer with a sliding window has no degrees: it is a ring of the last tokens, each of
// weight 1, where the new token takes the place of the one that has just left the window. Softmax does not ask in
// which order the slots are, so a ring is attended like any other cache.
//
// Keys and values may have 8 bits a number: each is then whole numbers times a step of its own, and a slot has three
// numbers where it otherwise has its degree: the degree, and the steps of key and value. A score is the product with
// the whole numbers times the step of the key, and a weight counts times the step of the value.
//
// The work is cut into tasks of one row, one KV head and at most kSplit slots. A task reads its keys and its
// values once, for all query heads of its KV head, and leaves a partial result (weighted values, maximum,
// sum of weights); the last task of a KV head to finish combines them. The cut depends on nothing but the
// fill and the capacity, so the result of a row has the same bits in any batch and with any number of threads.
//
// Vectors are those of GCC and Clang, so one source serves AVX-512, AVX2, SSE and NEON. The code is safe
// under -ffast-math: it neither makes nor tests for infinities and NaNs.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__F16C__)
#define CKV_FLOAT16
#elif defined(__aarch64__)
#include <arm_neon.h>
#define CKV_FLOAT16
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats per vector register
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kHeads = 4;  // query heads worked on at once: 32 vector registers hold 4 slots x 4 heads
#else
constexpr int kHeads = 3;
#endif

constexpr int64_t kSplit = 128;         // slots per task
constexpr int64_t kValueBlock = 8;      // slots whose values stay in the L1 cache while all heads use them
constexpr int64_t kAhead = 4096;        // bytes to prefetch ahead of use
constexpr int64_t kSerialWork = 65536;  // with fewer key elements than this, threads cost more than they save
constexpr float kLowest = -3.0e38f;     // stands for minus infinity
constexpr float kLeastStep = 1.17549435e-38f;

constexpr auto kOnes = [] {  // the degrees of a split of a ring
  std::array<float, kSplit> ones{};
  for (float& one : ones) one = 1.0f;
  return ones;
}();

// ---------------------------------------------------------------------------------------------- vectors

template <int W>
struct Vec {
  typedef float F __attribute__((vector_size(W * 4)));
  typedef int32_t I __attribute__((vector_size(W * 4)));
  typedef uint32_t U __attribute__((vector_size(W * 4)));
  typedef uint16_t H __attribute__((vector_size(W * 2)));
  typedef int8_t B __attribute__((vector_size(W)));
};

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

struct Int8 {
  int8_t number;
};

template <int W>
inline typename Vec<W>::F load(const float* from) {
  typename Vec<W>::F out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

template <int W>
inline typename Vec<W>::F load(const BFloat16* from) {
  typename Vec<W>::H half;
  std::memcpy(&half, from, sizeof half);
  return (typename Vec<W>::F)(__builtin_convertvector(half, typename Vec<W>::U) << 16);
}

template <int W>
inline typename Vec<W>::F load(const Int8* from) {
  typename Vec<W>::B numbers;
  std::memcpy(&numbers, from, sizeof numbers);
#if defined(__AVX512F__)  // by intrinsics, as GCC 12 widens in two steps
  if constexpr (W == 16)
    return (typename Vec<W>::F)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)numbers));
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) {
    __m128i low = {};
    std::memcpy(&low, &numbers, sizeof numbers);
    return (typename Vec<W>::F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
  }
#endif
  return __builtin_convertvector(__builtin_convertvector(numbers, typename Vec<W>::I), typename Vec<W>::F);
}

template <int W>
inline void store(float* to, typename Vec<W>::F x) {
  std::memcpy(to, &x, sizeof x);
}

template <int W>
inline void store(BFloat16* to, typename Vec<W>::F x) {  // rounds to nearest even; a NaN stays a NaN
  using U = typename Vec<W>::U;
  const U bits = (U)x;
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U is_nan = (U)((bits & 0x7fffffffu) > 0x7f800000u);
  const auto half = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0u & is_nan), typename Vec<W>::H);
  std::memcpy(to, &half, sizeof half);
}

// By intrinsics, as GCC 12 converts vectors of _Float16 one by one, and by the masked ones of AVX-512, as it warns of
// its own code in the others. Too large a number becomes infinite.
#if defined(__F16C__)

template <int W>
inline typename Vec<W>::F load(const Float16* from) {
  using F = typename Vec<W>::F;
  typename Vec<W>::H half;
  std::memcpy(&half, from, sizeof half);
  if constexpr (W == 16) {
    return (F)_mm512_maskz_cvtph_ps(0xffff, (__m256i)half);
  } else if constexpr (W == 8) {
    return (F)_mm256_cvtph_ps((__m128i)half);
  } else {
    __m128i low = {};
    std::memcpy(&low, &half, sizeof half);
    return (F)_mm_cvtph_ps(low);
  }
}

template <int W>
inline void store(Float16* to, typename Vec<W>::F x) {
  typename Vec<W>::H half;
  if constexpr (W == 16) {
    half = (typename Vec<W>::H)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
  } else if constexpr (W == 8) {
    half = (typename Vec<W>::H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  } else {
    const __m128i low = _mm_cvtps_ph((__m128)x, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(&half, &low, sizeof half);
  }
  std::memcpy(to, &half, sizeof half);
}

#elif defined(__aarch64__)

template <int W>
inline typename Vec<W>::F load(const Float16* from) {
  return (typename Vec<W>::F)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
}

template <int W>
inline void store(Float16* to, typename Vec<W>::F x) {
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
}

#endif

template <int W, typename T>
inline float to_float(T x) {
  const T lanes[W] = {x};
  return load<W>(lanes)[0];
}

#if defined(__clang__)
#define CKV_SHUFFLE(W, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CKV_SHUFFLE(W, a, b, ...) __builtin_shuffle(a, b, Vec<W>::I{__VA_ARGS__})
#endif

// (a0 + a1, a2 + a3, ..., b0 + b1, b2 + b3, ...)
inline Vec<4>::F pair_sums(Vec<4>::F a, Vec<4>::F b) {
  return CKV_SHUFFLE(4, a, b, 0, 2, 4, 6) + CKV_SHUFFLE(4, a, b, 1, 3, 5, 7);
}
inline Vec<8>::F pair_sums(Vec<8>::F a, Vec<8>::F b) {
  return CKV_SHUFFLE(8, a, b, 0, 2, 4, 6, 8, 10, 12, 14) + CKV_SHUFFLE(8, a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
inline Vec<16>::F pair_sums(Vec<16>::F a, Vec<16>::F b) {
  return CKV_SHUFFLE(16, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         CKV_SHUFFLE(16, a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Folds N vectors into one: W / N partial sums of x[0], then those of x[1], and so on. With as many vectors
// as lanes, in one go or in two, lane i is the sum of x[i].
template <int N, typename F>
inline F lane_sums(const F* x) {
  if constexpr (N == 2) {
    return pair_sums(x[0], x[1]);
  } else if constexpr (N == 1) {
    return x[0];
  } else {
    return pair_sums(lane_sums<N / 2>(x), lane_sums<N / 2>(x + N / 2));
  }
}

inline void prefetch(const void* from, int64_t bytes) {
  const char* at = static_cast<const char*>(from);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 3);
}

// exp(x) for x <= 0, to 1 or 2 units in the last place; e^-87 below x = -87.
template <int W>
inline typename Vec<W>::F exp_negative(typename Vec<W>::F x) {
  using F = typename Vec<W>::F;
  using I = typename Vec<W>::I;
  const F least = F{} - 87.0f;
  x = x < least ? least : x;  // a NaN stays a NaN
  const I power = __builtin_convertvector(x * 1.44269504089f - 0.5f, I);  // truncates: to nearest, as x <= 0
  const F n = __builtin_convertvector(power, F);
  const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // |r| <= log(2) / 2
  F y = r * (1.0f / 5040) + (1.0f / 720);
  y = y * r + (1.0f / 120);
  y = y * r + (1.0f / 24);
  y = y * r + (1.0f / 6);
  y = y * r + 0.5f;
  y = y * (r * r) + r + 1.0f;
  return (F)((I)y + (power << 23));
}

// tanh(x), to 3 units in the last place; a NaN stays a NaN.
template <int W>
inline typename Vec<W>::F tanh_of(typename Vec<W>::F x) {
  using F = typename Vec<W>::F;
  const F zero = {}, small = zero + 0.25f;
  const F size = x < zero ? -x : x;
  const F e = exp_negative<W>(size * -2.0f);
  const F s = x * x;
  F y = s * (62.0f / 2835) - (17.0f / 315);  // the Taylor series, as 1 - e has few digits where x is small
  y = y * s + (2.0f / 15);
  y = y * s - (1.0f / 3);
  y = y * s * size + size;
  y = size < small ? y : (1.0f - e) / (1.0f + e);
  return x < zero ? -y : y;
}

// ------------------------------------------------------------------------------------ scores and values

// scores[h][i] = query[h] . keys[i] for W slots, of which the first `count` exist (only those are read).
template <typename T, int W, int HEADS>
inline void score_slots(const float* query, const T* keys, int64_t dim, int64_t count, float* scores) {
  using F = typename Vec<W>::F;
  F partial[HEADS][W / 4];
  for (int64_t quad = 0; quad < W / 4; ++quad) {
    const T* key[4];
    for (int64_t i = 0; i < 4; ++i) key[i] = keys + std::min(quad * 4 + i, count - 1) * dim;
    F sum[HEADS][4] = {};
    for (int64_t d = 0; d < dim; d += W) {
      F k[4];
      for (int i = 0; i < 4; ++i) k[i] = load<W>(key[i] + d);
      for (int h = 0; h < HEADS; ++h) {
        const F q = load<W>(query + h * dim + d);
        for (int i = 0; i < 4; ++i) sum[h][i] += q * k[i];
      }
    }
    for (int h = 0; h < HEADS; ++h) partial[h][quad] = lane_sums<4>(sum[h]);
  }
  for (int h = 0; h < HEADS; ++h) store<W>(scores + h * kSplit, lane_sums<W / 4>(partial[h]));
}

// sums[h] += weights[h][i] * values[i], for TILE vectors of the head dimension. Empty slots are not read.
template <typename T, int W, int HEADS, int TILE>
inline void add_values(const float* weights, const float* degree, const T* values, int64_t dim, int64_t count,
                       float* sums) {
  using F = typename Vec<W>::F;
  F sum[HEADS][TILE];
  for (int h = 0; h < HEADS; ++h)
    for (int t = 0; t < TILE; ++t) sum[h][t] = load<W>(sums + h * dim + t * W);
  for (int64_t i = 0; i < count; ++i) {
    if (degree[i] == 0.0f) continue;
    F value[TILE];
    for (int t = 0; t < TILE; ++t) value[t] = load<W>(values + i * dim + t * W);
    for (int h = 0; h < HEADS; ++h)
      for (int t = 0; t < TILE; ++t) sum[h][t] += weights[h * kSplit + i] * value[t];
  }
  for (int h = 0; h < HEADS; ++h)
    for (int t = 0; t < TILE; ++t) store<W>(sums + h * dim + t * W, sum[h][t]);
}

template <typename T, int W, int HEADS>
inline void add_values(const float* weights, const float* degree, const T* values, int64_t dim, int64_t count,
                       float* sums) {
  int64_t d = 0;
  for (; d + 4 * W <= dim; d += 4 * W)
    add_values<T, W, HEADS, 4>(weights, degree, values + d, dim, count, sums + d);
  for (; d < dim; d += W) add_values<T, W, HEADS, 1>(weights, degree, values + d, dim, count, sums + d);
}

// Calls body(first head, number of heads as a constant) for heads 0 .. group, at most kHeads at a time.
template <int HEADS = kHeads, typename Body>
inline void for_heads(int64_t group, const Body& body, int64_t first = 0) {
  for (; group - first >= HEADS; first += HEADS) body(first, std::integral_constant<int, HEADS>());
  if constexpr (HEADS > 1) {
    if (first < group) for_heads<HEADS - 1>(group, body, first);
  }
}

// Bends scores, which come in units of `softcap`, to between -softcap and softcap.
template <int W>
inline void cap(float softcap, int64_t count, float* scores) {
  for (int64_t i = 0; i < count; i += W) store<W>(scores + i, tanh_of<W>(load<W>(scores + i)) * softcap);
}

// Multiplies numbers by others, of which there are `count`; those up to the end of a vector mean nothing.
template <int W>
inline void multiply(const float* by, int64_t count, float* numbers) {
  for (int64_t i = 0; i < count; i += W) store<W>(numbers + i, load<W>(numbers + i) * load<W>(by + i));
}

// Turns scores into weights n * exp(score - max) over slots with n > 0; gives the max and the sum of weights.
template <int W>
inline void weigh(const float* degree, int64_t count, float* scores, float* max_out, float* sum_out) {
  using F = typename Vec<W>::F;
  float n[kSplit];
  std::copy(degree, degree + count, n);
  const int64_t padded = (count + W - 1) / W * W;
  std::fill(n + count, n + padded, 0.0f);  // slots that do not exist count as empty

  const F zero = {}, lowest = zero + kLowest;
  F top = lowest;
  for (int64_t i = 0; i < padded; i += W) {
    const F score = load<W>(scores + i);
    const F masked = load<W>(n + i) > zero ? score : lowest;
    store<W>(scores + i, masked);
    top = top > masked ? top : masked;
  }
  float max = top[0];
  for (int i = 1; i < W; ++i) max = std::max(max, top[i]);

  F total = {};
  for (int64_t i = 0; i < padded; i += W) {
    const F weight = load<W>(n + i) * exp_negative<W>(load<W>(scores + i) - max);
    store<W>(scores + i, weight);
    total += weight;
  }
  float sum = 0.0f;
  for (int i = 0; i < W; ++i) sum += total[i];
  *max_out = max;
  *sum_out = sum;
}

// ------------------------------------------------------------------------------------------------ a step

inline int thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Rounds a vector of `dim` numbers to whole numbers, at most `largest`, times the step that is returned. That is a part of
// the largest number, rounded up to 16 significant bits. What is no number shows in the step.
template <int W, typename T>
inline float round_vector(const T* from, int64_t dim, float largest, Int8* to) {
  using F = typename Vec<W>::F;
  F top = {};
  for (int64_t d = 0; d < dim; d += W) {
    const F x = load<W>(from + d), size = x < F{} ? -x : x;
    top = (size > top) | (size != size) ? size : top;  // a NaN stays, as nothing is more
  }
  float most = top[0];
  for (int i = 1; i < W; ++i) most = top[i] > most || top[i] != top[i] ? top[i] : most;
  float step = most / largest;
  step = step < kLeastStep ? kLeastStep : step;
  uint32_t bits;
  std::memcpy(&bits, &step, sizeof bits);
  bits = (bits + 0xffu) & ~0xffu;
  std::memcpy(&step, &bits, sizeof bits);
  for (int64_t d = 0; d < dim; d += W) {
    const F x = load<W>(from + d) / step;
    for (int i = 0; i < W; ++i) {
      const float number = std::nearbyint(x[i]);
      to[d + i].number = std::abs(number) <= largest ? static_cast<int8_t>(number) : 0;
    }
  }
  return step;
}

// T is the type of what comes and goes, S that of the slots: the same, or Int8.
template <typename T, typename S>
struct Step {
  static constexpr bool kSteps = std::is_same_v<S, Int8>;  // whether slots have steps
  static constexpr int64_t kStored = kSteps ? 3 : 1;       // numbers of a slot in `degree`

  const T *q, *k, *v;
  S *keys, *values;
  T* out;
  float *degree, *queries;  // null for a ring
  T* last_queries;          // likewise
  const int64_t* fill;
  const bool* active;
  const int64_t* position;  // null for a ring
  const T* sinks;           // may be null
  const int64_t* rows;      // likewise
  int64_t batch, states, layers, layer, kv_heads, group, capacity, dim, last;
  float scale, softcap, rate, largest;

  // The degrees of a split begin at first_degree + its first slot * degree_step. Choosing between the two where they
  // are used made the float32 kernel a few percent slower (GCC 12).
  const float* first_degree = degree ? degree : kOnes.data();
  int64_t degree_step = degree ? kStored : 0;

  // Result of one task for its `group` query heads.
  struct Partial {
    float *sums, *max, *total;  // [group, dim], [group], [group]
  };
  int64_t partial_size() const { return (group * (dim + 2) + 15) / 16 * 16; }
  Partial partial_at(float* at) const { return {at, at + group * dim, at + group * (dim + 1)}; }

  int64_t scratch_size() const { return (group * (dim + kSplit) + (kSteps ? 3 * kSplit : 0) + 15) / 16 * 16; }

  // The row of the state that a row of the batch is of.
  int64_t state(int64_t row) const { return rows ? rows[row] : row; }

  bool takes(int64_t row) const { return active[state(row)]; }

  int64_t new_slot(int64_t row) const { return degree ? fill[state(row)] : fill[state(row)] % capacity; }

  // Slots in use, the new one included.
  int64_t used(int64_t row) const {
    const int64_t tokens = fill[state(row)];
    return (degree ? tokens : std::min(tokens, capacity - 1)) + 1;
  }

  int64_t splits(int64_t row) const { return takes(row) ? (used(row) - 1) / kSplit + 1 : 0; }

  int64_t first_slot(int64_t row, int64_t kv_head) const {
    return ((state(row) * layers + layer) * kv_heads + kv_head) * capacity;
  }

  template <int W>
  void append(int64_t row, int64_t kv_head) const {
    const int64_t slot = first_slot(row, kv_head) + new_slot(row);
    const int64_t from = (row * kv_heads + kv_head) * dim;
    if constexpr (kSteps) {
      degree[slot * kStored + 1] = round_vector<W>(k + from, dim, largest, keys + slot * dim);
      degree[slot * kStored + 2] = round_vector<W>(v + from, dim, largest, values + slot * dim);
    } else {
      std::copy(k + from, k + from + dim, keys + slot * dim);
      std::copy(v + from, v + from + dim, values + slot * dim);
    }
    if (degree) degree[slot * kStored] = 1.0f;
  }

  // Moves the running means of scale * q and of its square by `rate` towards those of this token's query heads, and
  // puts scale * q among the last ones.
  template <int W>
  void observe(int64_t row, int64_t kv_head) const {
    using F = typename Vec<W>::F;
    const T* q_heads = q + (row * kv_heads + kv_head) * group * dim;
    const int64_t cached = (state(row) * layers + layer) * kv_heads + kv_head;
    float* mean = queries + cached * 2 * dim;
    float* square = mean + dim;
    T* newest = last_queries + (cached * last + static_cast<uint64_t>(position[state(row)]) % last) * group * dim;
    for (int64_t d = 0; d < dim; d += W) {
      F sum = {}, squares = {};
      for (int64_t h = 0; h < group; ++h) {
        const F x = load<W>(q_heads + h * dim + d) * scale;
        store<W>(newest + h * dim + d, x);
        sum += x;
        squares += x * x;
      }
      const F old_mean = load<W>(mean + d), old_square = load<W>(square + d);
      store<W>(mean + d, old_mean + (sum / static_cast<float>(group) - old_mean) * rate);
      store<W>(square + d, old_square + (squares / static_cast<float>(group) - old_square) * rate);
    }
  }

  template <int W>
  void attend(int64_t row, int64_t kv_head, int64_t split, float* scratch, const Partial& result) const {
    if (split == new_slot(row) / kSplit) {
      append<W>(row, kv_head);  // this is the only task that reads the new slot
      if (queries) observe<W>(row, kv_head);
    }

    const int64_t count = std::min(kSplit, used(row) - split * kSplit);
    const int64_t slot = first_slot(row, kv_head) + split * kSplit;
    const S* key = keys + slot * dim;
    const S* value = values + slot * dim;
    const float* n = first_degree + slot * degree_step;

    float* query = scratch;
    float* scores = scratch + group * dim;
    float* steps = scores + group * kSplit;  // of keys and of values, and the degrees, where slots have steps
    if constexpr (kSteps) {
      for (int64_t i = 0; i < count; ++i) {
        steps[i] = n[i * kStored + 1];
        steps[kSplit + i] = n[i * kStored + 2];
        steps[2 * kSplit + i] = n[i * kStored];
      }
      n = steps + 2 * kSplit;
    }
    const T* q_heads = q + (row * kv_heads + kv_head) * group * dim;
    const float factor = softcap != 0.0f ? scale / softcap : scale;
    for (int64_t d = 0; d < group * dim; d += W) store<W>(query + d, load<W>(q_heads + d) * factor);

    const int64_t row_bytes = dim * sizeof(S);
    const int64_t ahead = kAhead / row_bytes;  // in slots
    for (int64_t i = 0; i < count; i += W) {  // near its end, this loop prefetches the first values
      const int64_t soon = i + ahead;
      prefetch(soon < count ? key + soon * dim : value + (soon - count) * dim, W * row_bytes);
      for_heads(group, [&](int64_t h, auto heads) {
        score_slots<S, W, heads()>(query + h * dim, key + i * dim, dim, std::min<int64_t>(W, count - i),
                                   scores + h * kSplit + i);
      });
    }
    for (int64_t h = 0; h < group; ++h) {
      float* own = scores + h * kSplit;
      if constexpr (kSteps) multiply<W>(steps, count, own);
      if (softcap != 0.0f) cap<W>(softcap, count, own);
      weigh<W>(n, count, own, result.max + h, result.total + h);
      if constexpr (kSteps) multiply<W>(steps + kSplit, count, own);  // the sum of weights is known already
    }
    std::fill(result.sums, result.sums + group * dim, 0.0f);
    for (int64_t i = 0; i < count; i += kValueBlock) {  // and this one the keys of the next task
      const int64_t soon = i + ahead;
      prefetch(soon < count ? value + soon * dim : key + soon * dim, kValueBlock * row_bytes);
      for_heads(group, [&](int64_t h, auto heads) {
        add_values<S, W, heads()>(scores + h * kSplit + i, n + i, value + i * dim, dim,
                                  std::min(kValueBlock, count - i), result.sums + h * dim);
      });
    }
  }

  // Adds up the partial results of one KV head, which lie `partial_size()` floats apart, and the sinks.
  template <int W>
  void combine(int64_t row, int64_t kv_head, float* partials) const {
    using F = typename Vec<W>::F;
    const int64_t count = splits(row);
    for (int64_t h = 0; h < group; ++h) {
      const int64_t head = kv_head * group + h;
      const float sink = sinks ? std::max(to_float<W>(sinks[head]), kLowest) : kLowest;  // minus infinity is no sink
      float max = sink;
      for (int64_t s = 0; s < count; ++s)
        max = std::max(max, partial_at(partials + s * partial_size()).max[h]);
      float total = sinks ? std::exp(sink - max) : 0.0f;
      for (int64_t s = 0; s < count; ++s) {
        const Partial part = partial_at(partials + s * partial_size());
        part.max[h] = std::exp(part.max[h] - max);  // from here on, the weight of this part
        total += part.max[h] * part.total[h];
      }
      T* to = out + (row * kv_heads * group + head) * dim;
      for (int64_t d = 0; d < dim; d += W) {
        F sum = {};
        for (int64_t s = 0; s < count; ++s) {
          const Partial part = partial_at(partials + s * partial_size());
          sum += part.max[h] * load<W>(part.sums + h * dim + d);
        }
        store<W>(to + d, sum / total);
      }
    }
  }

  template <int W>
  void run(int threads) const {
    int64_t tasks = 0, keys_read = 0;
    for (int64_t row = 0; row < batch; ++row) {
      tasks += kv_heads * splits(row);
      if (takes(row))
        keys_read += kv_heads * used(row);
      else
        std::fill_n(out + row * kv_heads * group * dim, kv_heads * group * dim, T());
    }

    // Kept from call to call, so that a step allocates nothing; 16 floats more, to align it to a cache line.
    static thread_local std::vector<float> arena;
    static thread_local std::vector<int64_t> counters;
    const size_t needed = threads * scratch_size() + tasks * partial_size() + 16;
    if (arena.size() < needed) arena.resize(needed);
    counters.assign(batch * kv_heads, 0);
    const uintptr_t start = (reinterpret_cast<uintptr_t>(arena.data()) + 63) / 64 * 64;
    float* const scratch = reinterpret_cast<float*>(start);
    float* const partials = scratch + threads * scratch_size();
    int64_t* const finished = counters.data();  // splits done, of each row and KV head

    // Static, so that a thread reads on where its last task ended. There is no barrier but the one that ends
    // the loop: whoever finishes the last split of a KV head combines its parts, in the order of the splits.
#pragma omp parallel for schedule(static) num_threads(threads) if (keys_read * dim > kSerialWork)
    for (int64_t task = 0; task < tasks; ++task) {
      int64_t row = 0, row_start = 0;
      while (task >= row_start + kv_heads * splits(row)) row_start += kv_heads * splits(row++);
      const int64_t count = splits(row);
      const int64_t kv_head = (task - row_start) / count, split = (task - row_start) % count;
      attend<W>(row, kv_head, split, scratch + thread_index() * scratch_size(),
                partial_at(partials + task * partial_size()));
      if (__atomic_add_fetch(&finished[row * kv_heads + kv_head], 1, __ATOMIC_ACQ_REL) == count)
        combine<W>(row, kv_head, partials + (task - split) * partial_size());
    }
  }
};

template <typename T, typename S>
int64_t decode(const Step<T, S>& step, int threads) {
  const int64_t most = step.degree ? step.capacity - 1 : step.capacity > 0 ? INT64_MAX : -1;  // a ring is never full
  for (int64_t row = 0; row < step.batch; ++row) {
    const int64_t state = step.state(row);
    if (state < 0 || state >= step.states) return -2;
    if (step.active[state] && (step.fill[state] < 0 || step.fill[state] > most)) return row + 1;
  }
  try {
    if (step.dim % kWidth == 0)
      step.template run<kWidth>(threads);
    else
      step.template run<std::min(kWidth, 8)>(threads);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}

}  // namespace

// Puts k, v and degree 1 into slot fill[row] of layer `layer`, takes q into the means in `queries` and into place
// position[row] % last of the last ones, and attends over slots 0 .. fill[row].
//   q, out [batch, kv_heads * group, dim]; k, v [batch, kv_heads, dim]; fill, active, position [states]
//   rows [batch], or null: the row of the state that each row of the batch is of, no two the same unless not active
//   keys, values [states, layers, kv_heads, capacity, dim]; degree [states, layers, kv_heads, capacity], where these have
//   8 bits [states, layers, kv_heads, capacity, 3], and the whole numbers of a vector are at most `largest`
//   queries [states, layers, kv_heads, 2, dim]: running means of scale * q and of its square; a token's share is `rate`
//   last_queries [states, layers, kv_heads, last, group, dim]: scale * q of the last tokens
//   sinks [kv_heads * group], or null: one logit a query head, not scaled
// Where degree, queries, last_queries and position are null, the cache is a ring, and fill the number of tokens seen
// before this one: k and v go into slot fill[row] % capacity, and the slots attended over are those below
// min(fill[row] + 1, capacity).
// Where softcap is not 0, scores become softcap * tanh(score / softcap) before the degree enters.
// A row that is not active is left as it is, and its output is zero. `dim` is a multiple of 8. Returns 0; row + 1
// if that row has no free slot (nothing is written then); -1 if there is no memory; -2 if a row is not in the state.
#define CKV_DECODE(NAME, T, S)                                                                                        \
  extern "C" int64_t NAME(const T* q, const T* k, const T* v, S* keys, S* values, float* degree, float* queries,      \
                          T* last_queries, const int64_t* fill, const bool* active, const int64_t* position,          \
                          const T* sinks, const int64_t* rows, T* out, int64_t batch, int64_t states, int64_t layers, \
                          int64_t layer, int64_t kv_heads, int64_t group, int64_t capacity, int64_t dim,              \
                          int64_t last, float scale, float softcap, float rate, float largest, int threads) {         \
    return decode(Step<T, S>{q, k, v, keys, values, out, degree, queries, last_queries, fill, active, position,       \
                             sinks, rows, batch, states, layers, layer, kv_heads, group, capacity, dim, last, scale,  \
                             softcap, rate, largest},                                                                 \
                  threads);                                                                                           \
  }

CKV_DECODE(ckv_decode_float32, float, float)
CKV_DECODE(ckv_decode_float32_int8, float, Int8)
CKV_DECODE(ckv_decode_bfloat16, BFloat16, BFloat16)
CKV_DECODE(ckv_decode_bfloat16_int8, BFloat16, Int8)
#ifdef CKV_FLOAT16
CKV_DECODE(ckv_decode_float16, Float16, Float16)
CKV_DECODE(ckv_decode_float16_int8, Float16, Int8)
#endif
