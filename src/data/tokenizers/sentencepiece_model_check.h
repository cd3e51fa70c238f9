// What the SentencePiece library believes of a model without looking, checked before it gets it. The library (0.1.97 to
// 0.2.0) walks a model's tries without bounds and collects what it finds in arrays of fixed size, so that a damaged or
// hostile model makes it read outside of its memory, or end the process.
#pragma once

#include <string>
#include <string_view>

namespace tessera::data {

/// Throws Error, beginning with `place`, for a model that the library may not be given:
///  * bytes that are no protobuf message, or one with groups, which no model has;
///  * a piece that is empty, has a NUL or more than 8000 bytes, or whose score is not finite;
///  * more than 64 user-defined pieces of which each begins with the one before;
///  * a table of character rules (precompiled_charsmap) whose double array or whose texts lead out of it, or in which
///    more than 32 rules match at one place.
/// It does not check what the library itself checks.
void check_sentencepiece_model(std::string_view model, const std::string& place);

}  // namespace tessera::data
