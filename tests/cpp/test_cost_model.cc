#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "qcoll/base/error.h"
#include "qcoll/comm/cost_model.h"
#include "qcoll/comm/policy.h"

using namespace qcoll;
using comm::CodecList;
using comm::CostModel;
using wire::Collective;

namespace {

const std::string kFirst = "qcoll-tuning 1\n";

CodecList codecs(const std::string& text) { return comm::parse_codec_list("test", text); }

std::string layout(const std::vector<std::string>& labels) {
  return comm::layout_of(topo::Topology(0, labels));
}

// Exact is faster below 200000 bytes.
CostModel crossing() {
  return CostModel::parse(kFirst +
                          "# a comment\r\n"
                          "\n"
                          "  1+1 \t reduce_scatter float32 exact 100000:100 300000:300\r\n"
                          "1+1 reduce_scatter fp32 int8:256/int4:128 100000:150 300000:250\n"
                          "1+1 all_reduce bf16 int8 4096:10\n");
}

// What a call gets in a group of layout 1+1.
comm::Choice choose(const CostModel& model, std::uint64_t bytes,
                    const std::optional<CodecList>& given = std::nullopt,
                    Collective collective = Collective::kReduceScatter, DType dtype = DType::kF32,
                    const comm::Options& options = {}) {
  return comm::choose(options, {}, given,
                      {.collective = collective,
                       .dtype = dtype,
                       .bytes = bytes,
                       .spans_nodes = true,
                       .costs = model.of("1+1")});
}

}  // namespace

TEST_CASE("a layout is the ranks of each node, largest first, and levels where there are racks") {
  CHECK_EQ(layout({"a", "a", "b", "b"}), "2+2");
  CHECK_EQ(layout({"a", "b", "a", "b"}), "2+2");
  CHECK_EQ(layout({"a", "b", "b", "b"}), "3+1");
  CHECK_EQ(layout({"a", "a"}), "2");
  CHECK_EQ(layout({"r/a", "r/b"}), "1+1");
  CHECK_EQ(layout({"r/a", "r/b", "s/c", "s/d"}), "1+1+1+1/2x2");
  CHECK_EQ(layout({"r/a", "r/b", "s/c"}), "1+1+1");
}

TEST_CASE("times between the points lie on lines, below the first on it, beyond in proportion") {
  const CostModel model = crossing();
  const auto micros = [&](std::uint64_t bytes) {
    const auto found =
        model.predict("1+1", Collective::kReduceScatter, DType::kF32, codecs("exact"), bytes);
    REQUIRE(found.has_value());
    return *found * 1e6;
  };
  CHECK_EQ(micros(0), doctest::Approx(100));
  CHECK_EQ(micros(99'999), doctest::Approx(100));
  CHECK_EQ(micros(100'000), doctest::Approx(100));
  CHECK_EQ(micros(150'000), doctest::Approx(150));
  CHECK_EQ(micros(300'000), doctest::Approx(300));
  CHECK_EQ(micros(3'000'000), doctest::Approx(3000));
}

TEST_CASE("a series is found by layout, collective, dtype and codecs") {
  const CostModel model = crossing();
  const auto has = [&](const char* where, Collective what, DType dtype, const char* list) {
    return model.predict(where, what, dtype, codecs(list), 1 << 20).has_value();
  };
  const auto scatter = Collective::kReduceScatter;
  CHECK(has("1+1", scatter, DType::kF32, "int8/int4"));
  CHECK(has("1+1", scatter, DType::kF32, "int8/int4/int4"));  // the same codec at every level
  CHECK(has("1+1", Collective::kAllReduce, DType::kBF16, "int8:256/int8:256"));
  CHECK_FALSE(has("1+1", scatter, DType::kF32, "int8"));
  CHECK_FALSE(has("1+1", scatter, DType::kF32, "int8:256/int4:64"));
  CHECK_FALSE(has("1+1", scatter, DType::kBF16, "exact"));
  CHECK_FALSE(has("1+1", scatter, DType::kF64, "exact"));
  CHECK_FALSE(has("1+1", Collective::kAllToAll, DType::kF32, "exact"));
  CHECK_FALSE(has("2+2", scatter, DType::kF32, "exact"));
  CHECK_EQ(model.of("2"), nullptr);
}

TEST_CASE("the policy takes what is predicted to be faster") {
  const CostModel model = crossing();
  const std::string because =
      "exact is faster than int8:256/int4:128 by the cost model (option tuning)";
  CHECK_EQ(choose(model, 199'000).exact_because, because);
  CHECK_EQ(choose(model, 200'000).exact_because, because);  // as fast, and it loses nothing
  CHECK_EQ(choose(model, 201'000).exact_because, "");
  CHECK_EQ(choose(model, 100).exact_because, "smaller than option min_bytes=65536");
  CHECK_FALSE(choose(model, 199'000, codecs("int8/int4")).exact());
  CHECK_EQ(choose(model, 1 << 30, codecs("exact")).exact_because, "codec=\"exact\" in the call");
}

TEST_CASE("where a series is missing the policy is that of the options") {
  const CostModel model = crossing();
  CHECK_FALSE(choose(model, 199'000, {}, Collective::kReduceScatter, DType::kBF16).exact());
  CHECK_FALSE(choose(model, 199'000, {}, Collective::kAllGather, DType::kBF16).exact());
  comm::Options options;
  options.reduce_scatter = codecs("int8:64");
  CHECK_FALSE(choose(model, 199'000, {}, Collective::kReduceScatter, DType::kF32, options).exact());
  options.all_reduce = codecs("int8");  // measured, but not exact beside it
  CHECK_FALSE(choose(model, 199'000, {}, Collective::kAllReduce, DType::kBF16, options).exact());
}

TEST_CASE("a context's codec is looked up too, and predictions are told") {
  const CostModel model = crossing();
  const comm::CallFacts facts{.collective = Collective::kReduceScatter,
                              .dtype = DType::kF32,
                              .bytes = 199'000,
                              .spans_nodes = true,
                              .costs = model.of("1+1")};
  comm::ThreadPolicy thread;
  thread.settings.set("reduce_scatter", "int4:64");
  CHECK_FALSE(comm::choose({}, thread, {}, facts).exact());
  const auto other = comm::predict({}, thread, {}, facts);
  CHECK_EQ(other.exact.value_or(0), doctest::Approx(199e-6));
  CHECK_FALSE(other.coded.has_value());
  thread.settings.set("reduce_scatter", "int8/int4");
  CHECK(comm::choose({}, thread, {}, facts).exact());
  CHECK_EQ(comm::predict({}, thread, {}, facts).coded.value_or(0), doctest::Approx(199.5e-6));
}

TEST_CASE("bad lines are named with what was expected") {
  const auto refuses = [](const std::string& text, const std::vector<std::string>& parts) {
    try {
      CostModel::parse(text);
      FAIL("was taken: " << text);
    } catch (const UsageError& error) {
      for (const auto& part : parts)
        CHECK_MESSAGE(std::string(error.what()).find(part) != std::string::npos, error.what());
    }
  };
  refuses("", {"line 1", "\"\"", "qcoll-tuning 1"});
  refuses("qcoll-tuning 2\n", {"line 1", "\"qcoll-tuning 2\"", "\"qcoll-tuning 1\""});
  const std::string start = "1+1 all_gather bf16 int8 ";
  refuses(kFirst + "\n# x\nx all_gather bf16 int8 1:1", {"line 4", "\"x\"", "like 2+2"});
  for (const char* bad : {"0", "1+", "+1", "-1", "1+1/2", "1+1/2x1", "1+1+1+1/2x3", "3+1+1+1/2x2",
                          "2+2/", "9999999999999999999999", "1+1/x"})
    refuses(kFirst + bad + " all_gather bf16 int8 1:1",
            {"line 2", "\"" + std::string(bad) + "\" is not a layout"});
  refuses(kFirst + "1+1 all_to_all bf16 int8 1:1", {"\"all_to_all\"", "reduce_scatter"});
  refuses(kFirst + "1+1", {"\"\" is not a collective"});
  refuses(kFirst + "1+1 all_gather fp64 int8 1:1", {"\"fp64\"", "bfloat16"});
  refuses(kFirst + "1+1 all_gather bf16 int3 1:1", {"line 2", "\"int3\"", "int8:256/int4:128"});
  refuses(kFirst + "1+1 all_gather bf16 int8\x1b[2J 1:1", {"int8\\x1b[2J"});
  refuses(kFirst + start, {"no points"});
  for (const char* bad : {"1", ":", "1:", ":1", "0:1", "1:0", "1:-1", "1:nan", "1:inf", "1:1e13",
                          "-1:1", "1.5:1", "1:1x", "1:1:1", "1,5:1", "99999999999999999999:1"})
    refuses(kFirst + start + bad, {"\"" + std::string(bad) + "\" is not a point", "BYTES:MICRO"});
  refuses(kFirst + start + "8:1 8:2", {"8 bytes follow 8", "increasing"});
  refuses(kFirst + start + "8:1\n1+1 all_gather bfloat16 int8:256/int8:256 8:1",
          {"line 3", "another series", "1+1", "all_gather", "bfloat16"});
  std::string many = kFirst;
  for (std::size_t i = 0; i <= CostModel::kMaxSeries; ++i)
    many += std::to_string(i + 1) + " all_gather bf16 int8 1:1\n";
  refuses(many, {"a series too many", "1000"});
  refuses(std::string(CostModel::kMaxFileBytes + 1, '#'), {"larger than 1048576"});
}

TEST_CASE("options agree on the contents of the file") {
  CHECK_NE(CostModel::parse(kFirst).fingerprint(), crossing().fingerprint());
  CHECK_EQ(crossing().fingerprint(), crossing().fingerprint());
  CHECK_EQ(crossing().fingerprint().size(), 16);
  CHECK_NE(comm::Options{}.to_string().find("; tuning=none"), std::string::npos);
  comm::Options options;
  options.tuning = std::make_shared<const CostModel>(crossing());
  CHECK_NE(options.to_string().find("; tuning=contents " + crossing().fingerprint()),
           std::string::npos);
}

TEST_CASE("what is no file is refused without waiting") {
  for (const char* path : {"/nonexistent/file", "/dev/zero", "/", "/proc/self/mem"})
    CHECK_THROWS_AS(CostModel::read(path), UsageError);
  CHECK_THROWS_AS(CostModel::read(std::string("a\0b", 3)), UsageError);
}
