# ruff: noqa: PT009 - no pytest in the sandbox
import unittest

from intervals import merge, total


class MergeTest(unittest.TestCase):
    def test_disjoint_intervals_stay_apart(self):
        self.assertEqual(merge([(7, 9), (1, 3)]), [(1, 3), (7, 9)])

    def test_overlapping_intervals_become_one(self):
        self.assertEqual(merge([(1, 4), (3, 8)]), [(1, 8)])

    def test_an_interval_within_another_does_not_shorten_it(self):
        self.assertEqual(merge([(1, 10), (2, 3), (20, 21)]), [(1, 10), (20, 21)])

    def test_adjacent_intervals_become_one(self):
        self.assertEqual(merge([(1, 2), (3, 4), (6, 7)]), [(1, 4), (6, 7)])

    def test_nothing_covers_nothing(self):
        self.assertEqual(merge([]), [])
        self.assertEqual(total([]), 0)

    def test_each_integer_is_counted_once(self):
        self.assertEqual(total([(1, 10), (2, 3), (11, 12)]), 12)


if __name__ == "__main__":
    unittest.main()
