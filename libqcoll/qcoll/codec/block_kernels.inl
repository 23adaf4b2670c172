// The kernels as plain loops. They are compiled once for each instruction set and the compiler
// vectorises them. Everything stays in the anonymous namespace: of a symbol that the variants
// share the linker might pick the AVX-512 code for a machine without it.
//
// Blocks are taken a tile at a time, a few whole blocks that fit the level-1 cache. Encoding a
// tile:
//   1. scan: the extreme element of each block gives its scale and reciprocal. Done for all
//      blocks of the tile before the next step, or every block would wait for its own division;
//   2. quantize each block to bytes, which for int8 are the payload;
//   3. int4: pack the bytes into nibbles.
// Decoding runs backwards: unpack the tile, then dequantize each block.
namespace qcoll::codec {
namespace {

constexpr std::size_t kTile = 2048;  // elements, but at least one block
constexpr std::size_t kTileMax = wire::kMaxBlock;
constexpr std::size_t kTileBlocks = kTile / wire::kMinBlock;

// Not from a header: see above.
constexpr std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }
constexpr std::size_t parts_of(std::size_t n, std::size_t size) { return (n + size - 1) / size; }

constexpr std::size_t tile_of(std::size_t block) {
  return block < kTile ? kTile / block * block : block;
}

// ---- encode ------------------------------------------------------------------------------------

// The element of largest magnitude, the positive one on a tie. Read as signed integers the largest
// is the largest positive element, as unsigned ones the largest negative element.
template <DType kType>
inline float extreme_of(const TypeOf<kType>* __restrict x, std::size_t n) {
  using Bits = typename Element<kType>::Bits;
  using SignedBits = typename Element<kType>::SignedBits;
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  Bits top = 0;
  SignedBits top_positive = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Bits u = Element<kType>::bits(x[i]);
    const SignedBits s = static_cast<SignedBits>(u);
    top = u > top ? u : top;
    top_positive = s > top_positive ? s : top_positive;
  }
  // No branch: the sign of the extreme is as random as the data. Without negative elements the
  // two are the same number.
  const Bits positive = static_cast<Bits>(top_positive);
  const Bits negative = static_cast<Bits>(top & ~kSign);
  const Bits use_negative = static_cast<Bits>(-static_cast<int>(negative > positive));
  return Element<kType>::widen(
      Element<kType>::from_bits(static_cast<Bits>(positive ^ ((positive ^ top) & use_negative))));
}

// Codes in the low kBits of each byte. |x * reciprocal| <= 2^(kBits-1) + 1/2, which rounds to even,
// so of the clamp of arith::quantize_one only the upper end can act (tests/cpp/test_codec.cc tries
// every mantissa).
template <int kBits, DType kType>
inline void quantize(const TypeOf<kType>* __restrict x, std::size_t n, float reciprocal,
                     std::uint8_t* __restrict codes) {
  constexpr std::int32_t kLargest = arith::kRounderBits + (1 << (kBits - 1)) - 1;
  for (std::size_t i = quantize_vectors<kBits, kType>(x, n, reciprocal, codes); i < n; ++i) {
    const float v = arith::mul_rn(Element<kType>::widen_finite(x[i]), reciprocal);
    const std::int32_t q =
        static_cast<std::int32_t>(arith::to_bits(arith::add_rn(v, arith::kRounder)));
    const std::int32_t clamped = q < kLargest ? q : kLargest;
    codes[i] = static_cast<std::uint8_t>(clamped);
  }
}

// Unrolling would hide the 16 lanes from the vectoriser.
inline void pack(const std::uint8_t* __restrict codes, std::size_t groups,
                 std::uint8_t* __restrict payload) {
  constexpr std::size_t kHalf = wire::kInt4Group / 2;
  for (std::size_t g = 0; g < groups; ++g) {
    const std::uint8_t* group = codes + g * wire::kInt4Group;
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kHalf; ++i)
      payload[g * kHalf + i] =
          static_cast<std::uint8_t>((group[i] & 15) | (group[kHalf + i] << 4));
  }
}

template <int kBits, DType kType>
std::size_t encode(const void* x, std::size_t count, std::size_t block, void* payload,
                   std::uint16_t* scales) {
  const std::size_t tile = tile_of(block);
  float extremes[kTileBlocks], reciprocals[kTileBlocks];
  std::uint8_t buffer[kBits == 4 ? kTileMax : 1];
  std::size_t non_finite = 0;
  for (std::size_t begin = 0; begin < count; begin += tile) {
    const auto* elements = static_cast<const TypeOf<kType>*>(x) + begin;
    const std::size_t n = least(tile, count - begin);
    const std::size_t blocks = parts_of(n, block);
    for (std::size_t b = 0; b < blocks; ++b)
      extremes[b] = extreme_of<kType>(elements + b * block, least(block, n - b * block));
    for (std::size_t b = 0; b < blocks; ++b) {
      scales[b] = arith::scale_of<kBits>(extremes[b]);
      reciprocals[b] = arith::reciprocal_of(scales[b]);
    }
    std::uint8_t* codes = kBits == 8 ? static_cast<std::uint8_t*>(payload) + begin : buffer;
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::size_t size = least(block, n - b * block);
      if (arith::is_finite_scale(scales[b])) {
        quantize<kBits, kType>(elements + b * block, size, reciprocals[b], codes + b * block);
      } else {
        ++non_finite;
        for (std::size_t i = 0; i < size; ++i) codes[b * block + i] = 0;
      }
    }
    if constexpr (kBits == 4) {
      const std::size_t groups = parts_of(n, wire::kInt4Group);
      for (std::size_t i = n; i < groups * wire::kInt4Group; ++i) codes[i] = 0;
      pack(codes, groups, static_cast<std::uint8_t*>(payload) + begin / 2);
    }
    scales += blocks;
  }
  return non_finite;
}

// ---- decode ------------------------------------------------------------------------------------

inline void unpack(const std::uint8_t* __restrict payload, std::size_t groups,
                   std::uint8_t* __restrict codes) {
  constexpr std::size_t kHalf = wire::kInt4Group / 2;
  for (std::size_t g = 0; g < groups; ++g) {
    std::uint8_t* group = codes + g * wire::kInt4Group;
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kHalf; ++i) {
      const std::uint8_t pair = payload[g * kHalf + i];
      group[i] = static_cast<std::uint8_t>(((pair & 15) ^ 8) - 8);
      group[kHalf + i] = static_cast<std::uint8_t>(((pair >> 4) ^ 8) - 8);
    }
  }
}

// Calls visit(codes, n, scale, begin) for every block: its n codes as bytes, and where it begins.
template <int kBits, class Visit>
inline void for_each_block(const void* payload, const std::uint16_t* scales, std::size_t count,
                           std::size_t block, Visit visit) {
  const std::size_t tile = tile_of(block);
  std::uint8_t buffer[kBits == 4 ? kTileMax : 1];
  for (std::size_t begin = 0; begin < count; begin += tile) {
    const std::size_t n = least(tile, count - begin);
    const auto* bytes = static_cast<const std::uint8_t*>(payload) + begin * kBits / 8;
    if constexpr (kBits == 4) unpack(bytes, parts_of(n, wire::kInt4Group), buffer);
    const std::uint8_t* codes = kBits == 8 ? bytes : buffer;
    for (std::size_t i = 0; i < n; i += block)
      visit(codes + i, least(block, n - i), *scales++, begin + i);
  }
}

// Whether a code of the block may exceed `limit`: only such blocks pay for the clamp.
template <int kBits>
inline bool reaches_past(float s, std::int32_t limit) {
  return arith::magnitude(arith::mul_rn(s, 1 << (kBits - 1))) > limit;
}

template <DType kType, bool kClamp>
inline void dequantize(const std::uint8_t* __restrict codes, std::size_t n, float s,
                       TypeOf<kType>* __restrict y) {
  std::size_t i = kClamp ? 0 : dequantize_vectors<kType>(codes, n, s, y);
  for (; i < n; ++i) {
    const float v = arith::dequantize_one(static_cast<std::int8_t>(codes[i]), s);
    y[i] = Element<kType>::narrow_in_range(kClamp ? arith::clamp(v, Element<kType>::kMax) : v);
  }
}

template <bool kClamp>
inline void dequantize_add(const std::uint8_t* __restrict codes, std::size_t n, float s,
                           float* __restrict sum) {
  for (std::size_t i = 0; i < n; ++i) {
    const float v = arith::dequantize_one(static_cast<std::int8_t>(codes[i]), s);
    sum[i] = arith::add_rn(sum[i], kClamp ? arith::clamp(v, arith::kMaxF32) : v);
  }
}

template <class T>
inline void fill(T* y, std::size_t n, T value) {
  for (std::size_t i = 0; i < n; ++i) y[i] = value;
}

template <int kBits, DType kType>
void decode(const void* payload, const std::uint16_t* scales, std::size_t count,
            std::size_t block, void* y) {
  auto* out = static_cast<TypeOf<kType>*>(y);
  const auto visit = [out](const std::uint8_t* codes, std::size_t n, std::uint16_t scale,
                           std::size_t begin) {
    const float s = arith::bf16_to_f32(scale);
    if (!arith::is_finite_scale(scale))
      fill(out + begin, n, Element<kType>::nan());
    else if (reaches_past<kBits>(s, Element<kType>::kMax))
      dequantize<kType, true>(codes, n, s, out + begin);
    else
      dequantize<kType, false>(codes, n, s, out + begin);
  };
  for_each_block<kBits>(payload, scales, count, block, visit);
}

template <int kBits>
void decode_add(const void* payload, const std::uint16_t* scales, std::size_t count,
                std::size_t block, float* sum) {
  const auto visit = [sum](const std::uint8_t* codes, std::size_t n, std::uint16_t scale,
                           std::size_t begin) {
    const float s = arith::bf16_to_f32(scale);
    if (!arith::is_finite_scale(scale))
      fill(sum + begin, n, arith::from_bits(arith::kNaNF32));
    else if (reaches_past<kBits>(s, arith::kMaxF32))
      dequantize_add<true>(codes, n, s, sum + begin);
    else
      dequantize_add<false>(codes, n, s, sum + begin);
  };
  for_each_block<kBits>(payload, scales, count, block, visit);
}

// ---- casts and sums ----------------------------------------------------------------------------

template <DType kType>
void to_bf16(const void* x, std::size_t count, std::uint16_t* __restrict y) {
  const auto* __restrict in = static_cast<const TypeOf<kType>*>(x);
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (kType == DType::kBF16)
      y[i] = in[i];
    else
      y[i] = arith::f32_to_bf16(arith::saturate(Element<kType>::widen(in[i]), arith::kMaxBf16));
  }
}

template <DType kType>
void from_bf16(const std::uint16_t* __restrict x, std::size_t count, void* y) {
  auto* __restrict out = static_cast<TypeOf<kType>*>(y);
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (kType == DType::kBF16)
      out[i] = x[i];
    else
      out[i] = Element<kType>::narrow(
          arith::saturate(arith::bf16_to_f32(x[i]), Element<kType>::kMax));
  }
}

template <DType kType>
void widen(const void* x, std::size_t count, float* __restrict sum) {
  const auto* __restrict in = static_cast<const TypeOf<kType>*>(x);
  for (std::size_t i = 0; i < count; ++i) sum[i] = Element<kType>::widen(in[i]);
}

template <DType kType>
void widen_add(const void* x, std::size_t count, float* __restrict sum) {
  const auto* __restrict in = static_cast<const TypeOf<kType>*>(x);
  for (std::size_t i = 0; i < count; ++i)
    sum[i] = arith::canonical(arith::add_rn(sum[i], Element<kType>::widen(in[i])));
}

template <DType kType>
void store_sum(const float* __restrict sum, std::size_t count, void* y) {
  auto* __restrict out = static_cast<TypeOf<kType>*>(y);
  for (std::size_t i = 0; i < count; ++i) out[i] = Element<kType>::narrow(sum[i]);
}

template <DType kType>
void store_mean(const float* __restrict sum, std::size_t count, float divisor, void* y) {
  auto* __restrict out = static_cast<TypeOf<kType>*>(y);
  for (std::size_t i = 0; i < count; ++i) {
    const float mean = arith::canonical(arith::div_rn(sum[i], divisor));
    out[i] = Element<kType>::narrow(arith::saturate(mean, Element<kType>::kMax));
  }
}

template <DType kType>
void store_scaled(const float* __restrict sum, std::size_t count, float factor, void* y) {
  auto* __restrict out = static_cast<TypeOf<kType>*>(y);
  for (std::size_t i = 0; i < count; ++i)
    out[i] = Element<kType>::narrow(arith::canonical(arith::mul_rn(sum[i], factor)));
}

}  // namespace
}  // namespace qcoll::codec
