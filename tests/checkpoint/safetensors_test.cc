#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "tests/data/support.h"

namespace tessera {
namespace {

using data::TemporaryFolder;

std::string with_header(const std::string& json, const std::string& data) {
  const std::uint64_t size = json.size();
  std::string text(reinterpret_cast<const char*>(&size), sizeof(size));
  return text + json + data;
}

TEST(Safetensors, RoundTrip) {
  const TemporaryFolder scratch;
  std::vector<float> numbers(6);
  std::iota(numbers.begin(), numbers.end(), -2.5f);
  std::vector<BFloat16> halves = {BFloat16(1.0f), BFloat16(-3.0f)};
  const NamedTensor tensors[] = {{"a.weight", Tensor(numbers.data(), {2, 3}, DType::kFloat32, Device::kCpu)},
                                 {"b", Tensor(halves.data(), {2}, DType::kBFloat16, Device::kCpu)}};
  const WrittenFile written = write_safetensors(scratch / "x.safetensors", tensors, {{"key", "value"}});
  EXPECT_EQ(written.size, std::filesystem::file_size(scratch / "x.safetensors"));
  EXPECT_EQ(written.checksum, checksum(MappedFile(scratch / "x.safetensors").bytes()));

  const SafetensorsFile file(scratch / "x.safetensors");
  EXPECT_EQ(file.metadata().at("key"), "value");
  EXPECT_EQ(file.entries().size(), 2u);
  EXPECT_EQ(file.at("b").dtype, "BF16");
  std::vector<float> read(6);
  file.read("a.weight", Tensor(read.data(), {2, 3}, DType::kFloat32, Device::kCpu));
  EXPECT_EQ(read, numbers);
  expect_error(
      [&] {
        file.read("a.weight", Tensor(read.data(), {3, 2}, DType::kFloat32, Device::kCpu));
      },
      {"a.weight", "[2,3]", "[3,2]"});
  expect_error([&] { file.at("c"); }, {"'c'"});
}

TEST(Safetensors, EveryTruncationIsAnError) {
  const TemporaryFolder scratch;
  float numbers[4] = {1, 2, 3, 4};
  const NamedTensor tensors[] = {{"a", Tensor(numbers, {4}, DType::kFloat32, Device::kCpu)}};
  write_safetensors(scratch / "whole", tensors, {});
  const std::string whole = read_text_file(scratch / "whole");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    data::write_file(scratch / "cut", whole.substr(0, length));
    EXPECT_THROW(SafetensorsFile(scratch / "cut"), Error) << length;
  }
}

/// Any order in the header is fine, and so are tensors without numbers.
TEST(Safetensors, TensorsInAnyOrderAndEmptyOnes) {
  const TemporaryFolder scratch;
  const std::string json = R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
                               "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                               "c": {"dtype": "F32", "shape": [0, 2], "data_offsets": [8, 8]}})";
  const SafetensorsFile file(data::write_file(scratch / "x", with_header(json, "bbbbaaaa")));
  EXPECT_EQ(static_cast<char>(file.at("a").bytes[0]), 'a');
  EXPECT_TRUE(file.at("c").bytes.empty());
}

TEST(Safetensors, HeadersThatLie) {
  const TemporaryFolder scratch;
  const auto refused = [&](const std::string& json, const std::vector<std::string>& parts) {
    const auto path = data::write_file(scratch / "bad", with_header(json, std::string(16, 'x')));
    expect_error([&] { SafetensorsFile file(path); }, parts);
  };
  refused("[]", {"no JSON object"});
  refused("{", {"not JSON"});
  refused("{\"a\": " + std::string(300'000, '[') + std::string(300'000, ']') + "}", {"nested deeper"});
  refused(R"({"a": 1})", {"'a'", "shape"});
  refused(R"({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 17]}})", {"outside"});
  refused(R"({"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 4]}})", {"outside"});
  refused(R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}})", {"does not take"});
  refused(R"({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}})", {"not possible"});
  refused(R"({"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}})", {"not possible"});
  refused(R"({"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 16]}})", {"unknown dtype"});
  refused(R"({"a": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}})", {"whole number"});
  refused(R"({"__metadata__": {"a": 1}})", {"__metadata__"});
  // The tensors leave bytes out at the begin, in the middle or at the end, or share some.
  refused(R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}})", {"bytes 0 to 4", "no tensor"});
  refused(R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})", {"bytes 12 to 16", "no tensor"});
  refused(R"({"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
              "a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}})",
          {"bytes 4 to 8", "no tensor"});
  refused(R"({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
              "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})",
          {"tensor 'b'", "0 to 16", "overlap", "'a'"});
  refused(R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
              "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}})",
          {"tensor 'b'", "8 to 16", "overlap", "'a'"});
  // Nothing in a file may send control codes to a terminal.
  refused(R"({"\u001b[2J": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}})", {"'\\x1b[2J'"});
  refused(R"({"a": {"dtype": "\u001b[2J", "shape": [4], "data_offsets": [0, 16]}})", {"'\\x1b[2J'"});
  refused(R"({"__metadata__": {"\u001b[2J": 1}})", {"__metadata__.\\x1b[2J"});
  const auto path = data::write_file(scratch / "huge", std::string(8, '\xff') + "{}");
  expect_error([&] { SafetensorsFile file(path); }, {"header"});
}

}  // namespace
}  // namespace tessera
