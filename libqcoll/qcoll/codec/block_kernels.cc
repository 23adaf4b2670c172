// One row of the kernel table, compiled once for each instruction set (cmake/isa_variants.cmake).
// The object exports the table alone: no inline function of a header may be emitted here
// (tests/cpp/test_symbols.cmake).
#include "qcoll/codec/codec.h"
#include "qcoll/codec/decode.inl"
#include "qcoll/codec/encode.inl"
#include "qcoll/codec/sums.inl"

#define QCOLL_TEXT_(x) #x
#define QCOLL_TEXT(x) QCOLL_TEXT_(x)
#define QCOLL_EACH_TYPE(f) {f<DType::kF32>, f<DType::kBF16>, f<DType::kF16>}
#define QCOLL_EACH_TYPE_OF(f, bits) \
  {f<bits, DType::kF32>, f<bits, DType::kBF16>, f<bits, DType::kF16>}

namespace qcoll::codec::QCOLL_ISA {

extern const Kernels kernels;
const Kernels kernels{
    .isa = QCOLL_TEXT(QCOLL_ISA),
    .encode_int8 = QCOLL_EACH_TYPE_OF(encode, 8),
    .encode_int4 = QCOLL_EACH_TYPE_OF(encode, 4),
    .decode_int8 = QCOLL_EACH_TYPE_OF(decode, 8),
    .decode_int4 = QCOLL_EACH_TYPE_OF(decode, 4),
    .add_int8 = decode_add<8>,
    .add_int4 = decode_add<4>,
    .to_bf16 = QCOLL_EACH_TYPE(to_bf16),
    .from_bf16 = QCOLL_EACH_TYPE(from_bf16),
    .widen = QCOLL_EACH_TYPE(widen),
    .widen_add = QCOLL_EACH_TYPE(widen_add),
    .store_sum = QCOLL_EACH_TYPE(store_sum),
    .store_mean = QCOLL_EACH_TYPE(store_mean),
    .store_scaled = QCOLL_EACH_TYPE(store_scaled),
    .stream_copy = stream_copy,
};

}  // namespace qcoll::codec::QCOLL_ISA
