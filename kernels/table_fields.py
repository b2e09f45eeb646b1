"""The columns of the table of parts, as constants of the kernels."""

import triton.language as tl

from .layer_table import Column

FIELDS = tl.constexpr(len(Column))
QK_RANK = tl.constexpr(int(Column.QK_RANK))
V_RANK = tl.constexpr(int(Column.V_RANK))
QK_OFFSET = tl.constexpr(int(Column.QK_OFFSET))
V_OFFSET = tl.constexpr(int(Column.V_OFFSET))
QUERY_OFFSET = tl.constexpr(int(Column.QUERY_OFFSET))
OUTPUT_OFFSET = tl.constexpr(int(Column.OUTPUT_OFFSET))
FIRST_HEAD = tl.constexpr(int(Column.FIRST_HEAD))
BASIS_ROW = tl.constexpr(int(Column.BASIS_ROW))
WORK_BEFORE = tl.constexpr(int(Column.WORK_BEFORE))
BODY = tl.constexpr(int(Column.BODY))
WORK = tl.constexpr(int(Column.WORK))
BASIS_COLUMN = tl.constexpr(int(Column.BASIS_COLUMN))
SHARE = tl.constexpr(int(Column.SHARE))
QK_16 = tl.constexpr(int(Column.QK_16))
V_16 = tl.constexpr(int(Column.V_16))
