// Tests passes that run in turns: their order, where they end, and what happens if one fails.
#include "ep/turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tensor/parallel.h"
#include "tests/threads_scope.h"

namespace tessera {
namespace {

using testing::ElementsAre;

/// Two passes that note what they do: "a0" is what the first pass (b: the second) computes before its first call,
/// "a:" stands for the beginning of a call, and "a." for its end.
class TwoPasses : public ::testing::Test {
 protected:
  void compute(const std::string& name, int segment) { notes_.push_back(name + std::to_string(segment)); }
  void call(const std::string& name, bool gives_way = true) {
    const Turns::Call call(&turns_);
    notes_.push_back(name + ":");
    if (gives_way) turns_.give_way();
    notes_.push_back(name + ".");
  }
  Turns::Body pass(const std::string& name, int num_calls) {
    return [this, name, num_calls] {
      for (int i = 0; i < num_calls; ++i) {
        compute(name, i);
        call(name);
      }
      compute(name, num_calls);
    };
  }

  Turns turns_;
  std::vector<std::string> notes_;
};

TEST_F(TwoPasses, ComputeDuringTheOthersCalls) {
  turns_.run(pass("a", 2), pass("b", 2));
  EXPECT_THAT(notes_, ElementsAre("a0", "a:", "b0", "a.", "b:", "a1", "b.", "a:", "b1", "a.", "b:", "a2", "b.", "b2"));
}

TEST_F(TwoPasses, TheLongerOneGoesOnAlone) {
  turns_.run(pass("a", 1), pass("b", 3));
  EXPECT_THAT(notes_, ElementsAre("a0", "a:", "b0", "a.", "b:", "a1", "b.", "b1", "b:", "b.", "b2", "b:", "b.", "b3"));
  notes_.clear();
  turns_.run(pass("a", 3), pass("b", 1));
  EXPECT_THAT(notes_, ElementsAre("a0", "a:", "b0", "a.", "b:", "a1", "b.", "a:", "b1", "a.", "a2", "a:", "a.", "a3"));
}

TEST_F(TwoPasses, WithoutCallsRunOneByOne) {
  turns_.run(pass("a", 0), pass("b", 2));
  EXPECT_THAT(notes_, ElementsAre("a0", "b0", "b:", "b.", "b1", "b:", "b.", "b2"));
  notes_.clear();
  turns_.run(pass("a", 1), pass("b", 0));
  EXPECT_THAT(notes_, ElementsAre("a0", "a:", "b0", "a.", "a1"));
}

// A call that only some ranks make changes no order of what is computed between the others.
TEST_F(TwoPasses, CallsThatDoNotGiveWayChangeNoOrder) {
  for (const bool has_more : {false, true}) {
    const auto with_more = [this, has_more](const std::string& name) {
      return [this, has_more, name] {
        for (int i = 0; i < 3; ++i) {
          compute(name, i);
          call(name);
          if (has_more) call(name, false);
        }
        compute(name, 3);
      };
    };
    notes_.clear();
    turns_.run(with_more("a"), with_more("b"));
    std::erase_if(notes_, [](const std::string& note) { return note.ends_with(':') || note.ends_with('.'); });
    EXPECT_THAT(notes_, ElementsAre("a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3")) << has_more;
  }
}

// The calls of later rounds lie within the last call of the first one. They give the other pass no further turn.
TEST_F(TwoPasses, CallsWithinACallChangeNoOrder) {
  for (const int num_within : {0, 1, 3}) {
    const auto with_more = [this, num_within](const std::string& name) {
      return [this, num_within, name] {
        for (int i = 0; i < 3; ++i) {
          compute(name, i);
          const Turns::Call outer(&turns_);
          for (int within = 0; within <= num_within; ++within) call(name, within == 0);
          notes_.push_back(name + " ends");
        }
        compute(name, 3);
      };
    };
    notes_.clear();
    turns_.run(with_more("a"), with_more("b"));
    std::erase_if(notes_, [](const std::string& note) { return note.ends_with(':') || note.ends_with('.'); });
    EXPECT_THAT(notes_, ElementsAre("a0", "b0", "a ends", "a1", "b ends", "b1", "a ends", "a2", "b ends", "b2",
                                    "a ends", "a3", "b ends", "b3"))
        << num_within;
  }
}

TEST_F(TwoPasses, OneMayWaitForTheOthersEnd) {
  turns_.run(pass("a", 3), [&] {
    pass("b", 1)();
    turns_.wait_for_other();
    notes_.emplace_back("end");
  });
  EXPECT_THAT(notes_,
              ElementsAre("a0", "a:", "b0", "a.", "b:", "a1", "b.", "a:", "b1", "a.", "a2", "a:", "a.", "a3", "end"));
}

TEST_F(TwoPasses, HooksSurroundTheOthersTurns) {
  const auto note = [this](const char* what) {
    return [this, what](int pass) { notes_.push_back(what + std::to_string(pass)); };
  };
  turns_.run([&] { call("a"); }, [&] { call("b"); }, {.pause = note("pause"), .resume = note("resume")});
  EXPECT_THAT(notes_, ElementsAre("a:", "pause0", "pause1", "resume0", "a.", "pause0", "resume1", "b:", "pause1",
                                  "resume0", "resume1", "b."));
}

TEST_F(TwoPasses, AFailureEndsBoth) {
  for (const bool first_fails : {true, false}) {
    for (const bool in_call : {true, false}) {
      notes_.clear();
      const auto failing = [&] {
        pass("x", 1)();
        const Turns::Call call(in_call ? &turns_ : nullptr);
        throw std::runtime_error("no more");
      };
      const Turns::Body first = first_fails ? Turns::Body(failing) : pass("y", 9);
      const Turns::Body second = first_fails ? pass("y", 9) : Turns::Body(failing);
      EXPECT_THROW(turns_.run(first, second), std::runtime_error);
      EXPECT_THAT(notes_, testing::Not(testing::Contains("y4")));
    }
  }
  // It can be used again.
  notes_.clear();
  turns_.run(pass("a", 0), pass("b", 0));
  EXPECT_THAT(notes_, ElementsAre("a0", "b0"));
}

// A call that ends lets the other pass begin its call. A hook that fails then must not throw out of a destructor.
TEST_F(TwoPasses, AHookThatFailsEndsBoth) {
  for (const bool at_pause : {true, false}) {
    for (int num_good = 0; num_good < 5; ++num_good) {
      int count = 0;
      const auto fail_later = [&](int) {
        if (count++ == num_good) throw std::runtime_error("a hook");
      };
      const Turns::Hooks hooks =
          at_pause ? Turns::Hooks{.pause = fail_later, .resume = {}} : Turns::Hooks{.pause = {}, .resume = fail_later};
      EXPECT_THROW(turns_.run(pass("a", 3), pass("b", 3), hooks), std::runtime_error) << at_pause << num_good;
    }
  }
}

TEST_F(TwoPasses, TheSecondIsNotBegunAfterAFailure) {
  EXPECT_THROW(turns_.run([] { throw std::runtime_error("at once"); }, pass("b", 0)), std::runtime_error);
  EXPECT_THAT(notes_, ElementsAre());
}

TEST_F(TwoPasses, OutsideOfARunCallsDoNothing) {
  call("a");
  turns_.wait_for_other();
  EXPECT_THAT(notes_, ElementsAre("a:", "a."));
  const Turns::Call none(nullptr);
}

TEST_F(TwoPasses, HaveTheSameNumberOfThreads) {
  for (const int count : {3, 1}) {
    const ThreadsScope threads(count);
    int first = 0, second = 0;
    turns_.run([&] { first = num_threads(); }, [&] { second = num_threads(); });
    EXPECT_EQ(first, count);
    EXPECT_EQ(second, count);
  }
}

}  // namespace
}  // namespace tessera
