# ruff: noqa: PT009 - no pytest in the sandbox
import unittest

from fields import join, split


class SplitTest(unittest.TestCase):
    def test_plain_fields(self):
        self.assertEqual(split("a,b,c"), ["a", "b", "c"])

    def test_empty_fields_are_kept(self):
        self.assertEqual(split("a,,"), ["a", "", ""])
        self.assertEqual(split(""), [""])

    def test_a_comma_in_quotes_is_text(self):
        self.assertEqual(split('a,"b,c",d'), ["a", "b,c", "d"])

    def test_two_quotes_are_one(self):
        self.assertEqual(split('"say ""hi""",x'), ['say "hi"', "x"])


class JoinTest(unittest.TestCase):
    def test_what_was_joined_splits_into_the_same(self):
        for fields in (["a", "b"], ["a,b", ""], ['say "hi"'], ['"', ",", ""], ["last"]):
            with self.subTest(fields=fields):
                self.assertEqual(split(join(fields)), fields)


if __name__ == "__main__":
    unittest.main()
