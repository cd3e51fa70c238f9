#include "base/error.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <new>

namespace tessera {
namespace {

TEST(Error, CheckNamesConditionPlaceAndValues) {
  int evaluations = 0;
  // the arguments of a message are evaluated only if the check fails
  TESSERA_CHECK(++evaluations == 1, "{}", ++evaluations);
  EXPECT_EQ(evaluations, 1);
  try {
    const int rows = 3;
    TESSERA_CHECK(rows == 4, "rows {} of {}", rows, 4);
    FAIL();
  } catch (const InternalError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("error_test.cc:"), std::string::npos) << message;
    EXPECT_NE(message.find("rows == 4"), std::string::npos) << message;
    EXPECT_NE(message.find(": rows 3 of 4"), std::string::npos) << message;
  }
  EXPECT_THROW(TESSERA_CHECK(false), InternalError);
}

TEST(Error, RequireAndFail) {
  EXPECT_NO_THROW(require(true, "{}", 1));
  EXPECT_THROW(require(false, "{}", 1), Error);
  try {
    fail("{} is {}", "x", 2);
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "x is 2");
  }
}

TEST(Error, SaysWithWhichStatusTheProgramEnds) {
  EXPECT_EQ(exit_status_of(Error("x")), ExitStatus::kWrongInput);
  EXPECT_EQ(exit_status_of(Error("x", ExitStatus::kStorageFailed)), ExitStatus::kStorageFailed);
  EXPECT_EQ(exit_status_of(std::filesystem::filesystem_error("x", std::error_code())), ExitStatus::kWrongInput);
  const auto status_of = [](std::errc reason) {
    return exit_status_of(std::filesystem::filesystem_error("x", std::make_error_code(reason)));
  };
  EXPECT_EQ(status_of(std::errc::io_error), ExitStatus::kStorageFailed);
  EXPECT_EQ(status_of(std::errc::permission_denied), ExitStatus::kWrongInput);
  EXPECT_EQ(exit_status_of(InternalError("x")), ExitStatus::kProgramError);
  EXPECT_EQ(exit_status_of(std::bad_alloc()), ExitStatus::kProgramError);
  // fmt throws the first if a disk is full, and std::thread the second.
  EXPECT_EQ(exit_status_of(std::system_error(ENOSPC, std::generic_category())), ExitStatus::kStorageFailed);
  EXPECT_EQ(exit_status_of(std::system_error(EAGAIN, std::generic_category())), ExitStatus::kProgramError);
}

}  // namespace
}  // namespace tessera
