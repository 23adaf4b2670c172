#include "checked_call.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>

#include "../test_codec_oracle.h"

namespace qcoll::test {
namespace {

constexpr double kLargest = 127.0 / 64;  // of the inputs

template <class T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(value));
}
template <class T>
T taken(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

void store(DType dtype, double value, std::byte* to) {
  switch (dtype) {
    case DType::kF32:
      return put(to, static_cast<float>(value));
    case DType::kBF16:
    case DType::kF16:
      return put(to, static_cast<std::uint16_t>(oracle::cast_bits(dtype, value)));
    case DType::kF64:
      return put(to, value);
    case DType::kI16:
      return put(to, static_cast<std::int16_t>(value));
    case DType::kI32:
      return put(to, static_cast<std::int32_t>(value));
    case DType::kI64:
      return put(to, static_cast<std::int64_t>(value));
    default:
      return put(to, static_cast<std::int8_t>(value));
  }
}

double load(DType dtype, const std::byte* from) {
  switch (dtype) {
    case DType::kF32:
      return taken<float>(from);
    case DType::kBF16:
    case DType::kF16:
      return oracle::value(dtype, taken<std::uint16_t>(from));
    case DType::kF64:
      return taken<double>(from);
    case DType::kI16:
      return taken<std::int16_t>(from);
    case DType::kI32:
      return taken<std::int32_t>(from);
    case DType::kI64:
      return static_cast<double>(taken<std::int64_t>(from));
    default:
      return taken<std::int8_t>(from);
  }
}

std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// What `from` has for `to`: small fractions, which all float types represent, and whole numbers.
double value_of(const CallSpec& spec, Rank from, Rank to, std::size_t i) {
  const std::uint64_t place = (spec.seed * 64 + from) * 64 + to;
  const auto number = static_cast<double>(mixed(mixed(place) + i) % 255);
  const double centred = number - 127;
  if (is_encodable(spec.dtype) || spec.dtype == DType::kF64) return centred / 64;
  return spec.dtype == DType::kBool ? std::fmod(number, 2) : centred;
}

// Of one encoding, relative to the largest value: half a step, and what clamping costs.
double error_of(const std::string& codec) {
  if (codec == "exact") return 0;
  return codec.find("int4") != std::string::npos ? 0.15 : 0.01;
}

double rounding_of(DType dtype) {
  if (dtype == DType::kBF16) return 0x1p-8;
  return dtype == DType::kF16 ? 0x1p-11 : 0;
}

template <class Byte, class Buffers>
std::vector<Byte*> pointers_to(Buffers& buffers) {
  std::vector<Byte*> pointers;
  for (auto& buffer : buffers) pointers.push_back(buffer.data());
  return pointers;
}

}  // namespace

std::string name_of(Verb verb) {
  switch (verb) {
    case Verb::kAllGather:
      return "all_gather";
    case Verb::kReduceScatter:
      return "reduce_scatter";
    case Verb::kAllReduce:
      return "all_reduce";
    case Verb::kAllToAll:
      return "all_to_all";
  }
  return "";
}

CheckedCall::CheckedCall(comm::Group& group, CallSpec spec)
    : group_(group),
      spec_(std::move(spec)),
      size_(group.topology().size()),
      rank_(group.topology().rank()) {
  prepare();
}

CheckedCall::~CheckedCall() {
  if (ended_.valid()) ended_.wait();
}

CheckedCall::Buffer CheckedCall::filled(Rank from, Rank to, std::size_t count) const {
  const std::size_t bytes = element_bytes(spec_.dtype);
  Buffer buffer(count * bytes);
  for (std::size_t i = 0; i < count; ++i)
    store(spec_.dtype, value_of(spec_, from, to, i), buffer.data() + i * bytes);
  return buffer;
}

// Unequal, some empty.
std::size_t CheckedCall::split(Rank from, Rank to) const {
  return spec_.count * static_cast<std::size_t>((from * 7 + to * 3) % 3);
}

void CheckedCall::prepare() {
  const auto empty = [&](std::size_t count) {
    return Buffer(count * element_bytes(spec_.dtype), std::byte{0x7f});
  };
  switch (spec_.verb) {
    case Verb::kAllGather:
      inputs_.push_back(filled(rank_, 0, spec_.count));
      for (Rank r = 0; r < size_; ++r) outputs_.push_back(empty(spec_.count));
      break;
    case Verb::kReduceScatter:
      for (Rank r = 0; r < size_; ++r) inputs_.push_back(filled(rank_, r, spec_.count));
      outputs_.push_back(empty(spec_.count));
      break;
    case Verb::kAllReduce:
      outputs_.push_back(filled(rank_, 0, spec_.count));
      break;
    case Verb::kAllToAll:
      for (Rank r = 0; r < size_; ++r) inputs_.push_back(filled(rank_, r, split(rank_, r)));
      for (Rank r = 0; r < size_; ++r) outputs_.push_back(empty(split(r, rank_)));
      break;
  }
}

std::string CheckedCall::text() const {
  return name_of(spec_.verb) + "(" + std::string(qcoll::name_of(spec_.dtype)) + ", " + spec_.codec +
         ", " + std::to_string(spec_.count) + ")";
}

void CheckedCall::start(bool inline_if_idle) {
  // Shared: a waiter may wake, and end this object, before set_value has returned.
  const auto told = std::make_shared<std::promise<void>>();
  group_.enqueue(
      text(), inline_if_idle, [this](std::uint64_t sequence) { run(sequence); },
      [told](std::exception_ptr error) { error ? told->set_exception(error) : told->set_value(); });
  ended_ = told->get_future();
}

void CheckedCall::run(std::uint64_t sequence) {
  comm::Call call{.verb = name_of(spec_.verb), .sequence = sequence, .dtype = spec_.dtype};
  call.timeout = spec_.timeout;
  call.choice.codecs = comm::parse_codec_list("codec", spec_.codec);
  if (spec_.codec == "exact") call.choice.exact_because = "asked for";
  auto& engine = group_.communicator();
  auto inputs = pointers_to<const std::byte>(inputs_);
  auto outputs = pointers_to<std::byte>(outputs_);
  switch (spec_.verb) {
    case Verb::kAllGather:
      return engine.all_gather(call, inputs[0], outputs, spec_.count);
    case Verb::kReduceScatter:
      return engine.reduce_scatter(call, {wire::ReduceOp::kAvg}, inputs, outputs[0], spec_.count);
    case Verb::kAllReduce:
      return engine.all_reduce(call, {wire::ReduceOp::kSum}, outputs[0], spec_.count);
    case Verb::kAllToAll: {
      std::vector<std::size_t> to;
      std::vector<std::size_t> from;
      for (Rank r = 0; r < size_; ++r) {
        to.push_back(split(rank_, r));
        from.push_back(split(r, rank_));
      }
      return engine.all_to_all(call, inputs, to, outputs, from);
    }
  }
}

double CheckedCall::expected(std::size_t buffer, std::size_t i) const {
  const auto other = static_cast<Rank>(buffer);
  double sum = 0;
  switch (spec_.verb) {
    case Verb::kAllGather:
      return value_of(spec_, other, 0, i);
    case Verb::kReduceScatter:
      for (Rank r = 0; r < size_; ++r) sum += value_of(spec_, r, rank_, i);
      return sum / size_;
    case Verb::kAllReduce:
      for (Rank r = 0; r < size_; ++r) sum += value_of(spec_, r, 0, i);
      return sum;
    case Verb::kAllToAll:
      return value_of(spec_, other, rank_, i);
  }
  return 0;
}

// Every value is encoded once at each of two levels at most, an all-reduce gathers besides.
double CheckedCall::error_limit() const {
  const double error = error_of(spec_.codec) + rounding_of(spec_.dtype);
  switch (spec_.verb) {
    case Verb::kReduceScatter:
      return (2 * error + 0x1p-20) * kLargest;
    case Verb::kAllReduce:
      return 3 * error * kLargest * size_;
    default:
      return spec_.codec == "exact" ? 0 : error * kLargest;
  }
}

void CheckedCall::check() {
  ended_.get();
  const std::size_t bytes = element_bytes(spec_.dtype);
  const double limit = error_limit();
  double squares = 0;
  std::size_t elements = 0;
  const auto fail = [&](const std::string& what) {
    throw std::runtime_error(text() + " on rank " + std::to_string(rank_) + ": " + what);
  };
  for (std::size_t b = 0; b < outputs_.size(); ++b)
    for (std::size_t i = 0; i * bytes < outputs_[b].size(); ++i, ++elements) {
      const double is = load(spec_.dtype, outputs_[b].data() + i * bytes);
      const double should = expected(b, i);
      const double off = is - should;
      squares += off * off;
      if (std::abs(off) <= limit) continue;  // not so for NaN
      std::ostringstream what;
      what << "element " << i << " of slice " << b << " is " << is << ", expected " << should
           << " within " << limit;
      fail(what.str());
    }
  // An element of another place may be within the limit of a coarse codec; most of many are not.
  const double usual = elements == 0 ? 0 : std::sqrt(squares / static_cast<double>(elements));
  if (elements >= 200 && usual > limit / 2)
    fail("the usual error is " + std::to_string(usual) + " of at most " + std::to_string(limit));
}

std::uint64_t CheckedCall::digest() const {
  if (spec_.verb != Verb::kAllGather && spec_.verb != Verb::kAllReduce) return 0;
  std::uint64_t digest = 0xcbf29ce484222325;
  for (const Buffer& buffer : outputs_)
    for (const std::byte b : buffer)
      digest = (digest ^ static_cast<std::uint64_t>(b)) * 0x100000001b3;
  return digest;
}

}  // namespace qcoll::test
