#include "data/file_kind.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/text.h"
#include "data/shard.h"

namespace tessera::data {
namespace {

using std::string_view_literals::operator""sv;

constexpr const char* kOnlyText = "only text can become a dataset";

/// A file format that is recognized by bytes at a fixed position.
struct Magic {
  std::size_t at;
  std::string_view bytes;
  const char* name;
  const char* remedy;
  bool has_zeros = false;  // a text may begin with the mark, but such files also have zero bytes
};

// If one mark begins with another, the longer one is first. Short marks that a text could begin with ("BM", "MZ",
// "ORC") are not listed: zero bytes tell such files from a text.
constexpr Magic kMagics[] = {
    {0, "PAR1"sv, "Parquet",
     "Parquet is not read yet: convert it to JSON lines with python3 -c \"import pandas; "
     "pandas.read_parquet('IN.parquet').to_json('OUT.jsonl', orient='records', lines=True)\"",
     true},
    {0, "ARROW1\0\0"sv, "an Arrow file", "convert it to JSON lines, each with a string \"text\""},
    {0, "\xFF\xFF\xFF\xFF"sv, "an Arrow stream", "convert it to JSON lines, each with a string \"text\""},
    {0, "Obj\x01"sv, "an Avro file", "convert it to JSON lines, each with a string \"text\""},
    {0, "\x28\xB5\x2F\xFD"sv, "compressed by zstd", "zstd is not read yet, gzip is: zstd -dc IN.zst | gzip > OUT.gz"},
    {0, "\xFD\x37zXZ\0"sv, "compressed by xz", "xz is not read, gzip is: xz -dc IN.xz | gzip > OUT.gz"},
    {4, "1AY&SY"sv, "compressed by bzip2", "bzip2 is not read, gzip is: bzip2 -dc IN.bz2 | gzip > OUT.gz"},
    {0, "\x04\x22\x4D\x18"sv, "compressed by lz4", "lz4 is not read, gzip is: lz4 -dc IN.lz4 | gzip > OUT.gz"},
    {0, "\x1F\x9D"sv, "compressed by compress", "it is not read, gzip is: zcat IN.Z | gzip > OUT.gz"},
    {0, "\x1F\x8B"sv, "compressed by gzip twice", "decompress it once: gzip -dc IN.gz > OUT.gz"},
    {0, "PK\x03\x04"sv, "a zip archive (or .docx, .xlsx, .epub, .npz, .pt)",
     "unpack it, and give the texts that it holds"},
    {0, "PK\x05\x06"sv, "a zip archive", "unpack it, and give the texts that it holds"},
    {0, "7z\xBC\xAF\x27\x1C"sv, "a 7z archive", "unpack it, and give the folder"},
    {0, "Rar!\x1A\x07"sv, "a rar archive", "unpack it, and give the folder"},
    {257, "ustar"sv, "a tar archive", "unpack it (tar -xf IN.tar -C FOLDER), and give the folder"},
    {0, "WARC/1."sv, "a web archive (WARC)", "extract the pages' texts to JSON lines"},
    {0, "\x89PNG\r\n\x1A\n"sv, "a PNG image", kOnlyText},
    {0, "\xFF\xD8\xFF"sv, "a JPEG image", kOnlyText},
    {0, "GIF87a"sv, "a GIF image", kOnlyText, true},
    {0, "GIF89a"sv, "a GIF image", kOnlyText, true},
    {0, "II*\0"sv, "a TIFF image", kOnlyText},
    {0, "MM\0*"sv, "a TIFF image", kOnlyText},
    {4, "ftyp"sv, "a video, sound or image file (MP4, HEIF)", kOnlyText, true},
    {0, "\x1A\x45\xDF\xA3"sv, "a video file (Matroska, WebM)", kOnlyText},
    {0, "ID3\x03"sv, "an MP3 sound file", kOnlyText},
    {0, "ID3\x04"sv, "an MP3 sound file", kOnlyText},
    {0, "OggS\0"sv, "an Ogg sound file", kOnlyText},
    {0, "fLaC\0"sv, "a FLAC sound file", kOnlyText},
    {0, "%PDF-"sv, "a PDF document", "extract its text first: pdftotext IN.pdf OUT.txt"},
    {0, "{\\rtf"sv, "an RTF document", "save it as plain text in UTF-8"},
    {0, "\xD0\xCF\x11\xE0\xA1\xB1\x1A\xE1"sv, "an old Office document", "save it as plain text in UTF-8"},
    {0,
     "\x7F"
     "ELF"sv,
     "an ELF program or library", kOnlyText},
    {0, "SQLite format 3\0"sv, "an SQLite database", "export its texts as JSON lines, each with a string \"text\""},
    {0, "\x89HDF\r\n\x1A\n"sv, "an HDF5 file", kOnlyText},
    {0, "\x93NUMPY"sv, "a NumPy array", kOnlyText},
    {0, "GGUF"sv, "model weights (GGUF)", kOnlyText, true},
    {0, std::string_view(kShardMagic.data(), kShardMagic.size()), "a shard of a dataset that is prepared already",
     "give its folder as training.dataset_path"},
    {0, "\xFF\xFE\0\0"sv, "text in UTF-32", "convert it: iconv -f UTF-32 -t UTF-8 IN > OUT"},
    {0, "\0\0\xFE\xFF"sv, "text in UTF-32", "convert it: iconv -f UTF-32 -t UTF-8 IN > OUT"},
    {0, "\xFF\xFE"sv, "text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 IN > OUT"},
    {0, "\xFE\xFF"sv, "text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 IN > OUT"},
};

ForeignKind binary_data() { return {.name = "binary data", .remedy = kOnlyText}; }

/// Returns the kind of a file with zero bytes. In UTF-16 of most languages half of the bytes at odd or at even
/// positions are 0.
ForeignKind kind_with_zeros(std::string_view bytes) {
  std::array<std::size_t, 2> num_zeros{};
  for (std::size_t i = 0; i < bytes.size(); ++i) num_zeros[i % 2] += bytes[i] == '\0' ? 1 : 0;
  const auto [even, odd] = num_zeros;
  const std::size_t most = std::max(even, odd), least = std::min(even, odd);
  if (most < bytes.size() / 4 || least > most / 16) return binary_data();
  return {.name = "text in UTF-16 without a byte order mark",
          .remedy = fmt::format("convert it: iconv -f UTF-16{} -t UTF-8 IN > OUT", odd > even ? "LE" : "BE")};
}

}  // namespace

std::optional<ForeignKind> find_foreign_kind(std::string_view beginning) {
  const bool has_zeros = beginning.find('\0') != std::string_view::npos;
  for (const Magic& magic : kMagics) {
    if (magic.has_zeros && !has_zeros) continue;
    if (beginning.size() < magic.at || !beginning.substr(magic.at).starts_with(magic.bytes)) continue;
    return ForeignKind{.name = magic.name, .remedy = magic.remedy};
  }
  if (has_zeros) return kind_with_zeros(beginning);

  const bool is_cut = beginning.size() >= kKindBytes;
  std::string text(is_cut ? beginning.substr(0, whole_characters(beginning)) : beginning);
  const std::uint64_t num_ill_formed = repair_utf8(text);
  const auto is_lead = [](char c) { return static_cast<std::uint8_t>(c) >= 0xC0; };
  const auto num_beyond_ascii = static_cast<std::uint64_t>(std::ranges::count_if(text, is_lead));
  const std::uint64_t num_well_formed = num_beyond_ascii - num_ill_formed;  // each repaired part became U+FFFD
  if (num_ill_formed <= num_well_formed) return std::nullopt;
  const auto is_control = [](char c) { return static_cast<std::uint8_t>(c) < 0x20 && (c < '\t' || c > '\r'); };
  const auto num_controls = static_cast<std::size_t>(std::ranges::count_if(beginning, is_control));
  if (num_controls > beginning.size() / 32) return binary_data();
  return ForeignKind{.name = "text that is not UTF-8 (Latin-1, Windows-1252 or another old encoding)",
                     .remedy = "convert it: iconv -f WINDOWS-1252 -t UTF-8 IN > OUT, or name the encoding that it has"};
}

}  // namespace tessera::data
