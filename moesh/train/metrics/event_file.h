#pragma once
// TensorBoard's event files: records of a length, the data, and a checksum of each; the data is an
// Event message of tensorflow's event.proto, which is written here by hand.

#include <cstdint>
#include <string>
#include <string_view>

#include "moesh/train/metrics/record.h"

namespace moesh::train::event_file {

/// CRC-32C (Castagnoli) of the bytes.
std::uint32_t crc32c(std::string_view bytes);
/// The checksum as the files have it: rotated, with a constant added.
std::uint32_t masked(std::uint32_t crc);

/// One record around the data.
std::string record(std::string_view data);

/// The first event of a file.
std::string version_event(double time);
/// Tells readers that events of this step and later ones, in older files, are of a run that was
/// taken up from before it.
std::string restart_event(double time, std::int64_t step);
std::string scalars_event(double time, std::int64_t step, const Scalars& scalars);

}  // namespace moesh::train::event_file
