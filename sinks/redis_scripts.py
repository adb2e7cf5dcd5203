"""The scripts of ``RedisBackend``: each is one atomic step in the server."""

from __future__ import annotations

import hashlib

# The prologue of scripts that write. KEYS[2] are the rows, KEYS[3] is the list of touched keys, and
# the last two keys are the sorted set of due keys, and the count. The count contains the column of
# that set as ``order``, if there is one. ``lost``: nil if the numbers match, else the script's
# answer: -4, the expected number, the actual number, and what was counted: an index into
# ``COUNTED_PARTS``, from 1.
_COUNTED = """
local due, counts = KEYS[#KEYS - 1], KEYS[#KEYS]
local expected = redis.call('HMGET', counts, 'rows', 'touched', 'due', 'order')
local held = {redis.call('HLEN', KEYS[2]), redis.call('LLEN', KEYS[3])}
if expected[4] then held[3] = redis.call('ZCARD', due) end
local lost = nil
for i = 1, #held do
  if expected[i] ~= tostring(held[i]) then lost = {-4, expected[i] or '', tostring(held[i]), i} end
end
local function counted()
  redis.call('HSET', counts, 'rows', redis.call('HLEN', KEYS[2]), 'touched', redis.call('LLEN', KEYS[3]))
  if expected[4] then redis.call('HSET', counts, 'due', redis.call('ZCARD', due)) end
end
"""
COUNTED_PARTS = ("rows", "entries of the list of touched keys", "entries of the sorted set of what is due")

# ``denied``: the error for the first of several commands that the user may not use, so that none of
# them takes effect without the others. Permissions may be withdrawn at any time. Redis 6 cannot
# tell.
_PERMITTED = """
local function denied(...)
  for _, command in ipairs(redis.acl_check_cmd and {...} or {}) do
    local others = command == 'UNLINK' and {} or {'1', '1'} -- all arguments of UNLINK are keys
    if not redis.acl_check_cmd(command, KEYS[2], unpack(others)) then
      return redis.error_reply('NOPERM this user may not use the command ' .. command)
    end
  end
end
"""

# The server's own information, if the user may read it.
_INFO = """
local function info(section)
  local found = redis.pcall('INFO', section)
  return type(found) == 'string' and found or ''
end
"""

# KEYS: header, rows, touched, deleted, due, count. ARGV: expected header, number of rows, number of
# tombstones, header for the writes, header afterwards ("" for both: the expected one); then for
# each row its key, the expected beginning of its stored text ("" for no row), and its new text.
# Tombstones come first. Then, if the rows have an order, the number of each row that is no
# tombstone. Returns 1; or 0 and the header found; or -1 and the refused key. Writes before an error
# are not undone: so the header is opened before any row.
PUT = f"""{_COUNTED}{_PERMITTED}{_INFO}
local header = redis.call('GET', KEYS[1])
if header ~= ARGV[1] then return {{0, header}} end
if lost then return lost end
local count, deleted = tonumber(ARGV[2]), tonumber(ARGV[3])
for start = 0, count - 1, 2000 do
  local fields, stop = {{}}, math.min(start + 2000, count) - 1
  for i = start, stop do fields[#fields + 1] = ARGV[6 + 3 * i] end
  local found = redis.call('HMGET', KEYS[2], unpack(fields))
  for i = start, stop do
    local expected, row = ARGV[7 + 3 * i], found[i - start + 1]
    if expected == '' then
      if row then return {{-1, ARGV[6 + 3 * i]}} end
    elseif not row or string.sub(row, 1, #expected) ~= expected then
      return {{-1, ARGV[6 + 3 * i]}}
    end
  end
end
local refused = denied('SET', 'UNLINK', 'HSET', 'RPUSH', 'SADD') or (expected[4] and denied('ZADD', 'ZREM'))
if refused then return refused end
if ARGV[4] ~= '' then
  if string.find(info('replication'), 'role:slave', 1, true) then
    return redis.error_reply('READONLY it follows another server')
  end
  redis.call('SET', KEYS[1], ARGV[4])
  redis.call('UNLINK', KEYS[3])
end
for start = 0, count - 1, 2000 do
  local pairs, fields = {{}}, {{}}
  for i = start, math.min(start + 2000, count) - 1 do
    pairs[#pairs + 1] = ARGV[6 + 3 * i]
    pairs[#pairs + 1] = ARGV[8 + 3 * i]
    fields[#fields + 1] = ARGV[6 + 3 * i]
    if i < deleted then redis.call('SADD', KEYS[4], ARGV[6 + 3 * i]) end
  end
  redis.call('HSET', KEYS[2], unpack(pairs))
  redis.call('RPUSH', KEYS[3], unpack(fields))
end
if expected[4] then
  local first = 6 + 3 * count - deleted
  for start = 0, count - 1, 2000 do
    local scores, gone = {{}}, {{}}
    for i = start, math.min(start + 2000, count) - 1 do
      if i < deleted then
        gone[#gone + 1] = ARGV[6 + 3 * i]
      else
        scores[#scores + 1] = ARGV[first + i]
        scores[#scores + 1] = ARGV[6 + 3 * i]
      end
    end
    if #scores > 0 then redis.call('ZADD', due, unpack(scores)) end
    if #gone > 0 then redis.call('ZREM', due, unpack(gone)) end
  end
end
counted()
if ARGV[4] ~= '' then redis.call('SET', KEYS[1], ARGV[5]) end
return {{1}}
"""

# KEYS: header, rows, touched, due, count. ARGV: expected header, new header, 1 if the new header
# opens another transaction, the required identity of this server ("" for any). Returns as PUT,
# with two additions: 1 comes with the identity of the server, and -2 means another server. A server
# gets a new run id when it starts, and a new replication id when it takes the data of another
# server or stops following one. If the user may not read it (INFO), the identity is empty.
RAISE = f"""{_COUNTED}{_PERMITTED}{_INFO}
local header = redis.call('GET', KEYS[1])
if header ~= ARGV[1] then return {{0, header}} end
if lost then return lost end
local links = info('replication')
if string.find(links, 'role:slave', 1, true) then return redis.error_reply('READONLY it follows another server') end
local run, replication = string.match(info('server'), 'run_id:(%w+)'), string.match(links, 'master_replid:(%w+)')
local server = (run or replication) and (run or '') .. '/' .. (replication or '') or ''
if ARGV[4] ~= '' and ARGV[4] ~= server then return {{-2}} end
local refused = denied('SET', 'UNLINK', 'HSET')
if refused then return refused end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[3] == '1' then redis.call('UNLINK', KEYS[3]) end
counted()
return {{1, server}}
"""

# KEYS: header, rows, touched, deleted, due, count. ARGV: header; then for each key the expected
# beginning of the text of the row to remove, or "" to take the key off the list of tombstones only.
# Returns as PUT; 1 comes with the number of rows removed.
PURGE = f"""{_COUNTED}{_PERMITTED}
local header = redis.call('GET', KEYS[1])
if header ~= ARGV[1] then return {{0, header}} end
if lost then return lost end
local refused = denied('HDEL', 'SREM', 'HSET')
if refused then return refused end
local removed = 0
for i = 2, #ARGV, 2 do
  local row = ARGV[i + 1] ~= '' and redis.call('HGET', KEYS[2], ARGV[i])
  if row and string.sub(row, 1, #ARGV[i + 1]) == ARGV[i + 1] then
    removed = removed + redis.call('HDEL', KEYS[2], ARGV[i])
  end
  redis.call('SREM', KEYS[4], ARGV[i])
end
counted()
return {{1, removed}}
"""

# KEYS: header, rows, touched, deleted, due, count. ARGV: expected header, new header, the column of
# the order ("" for none). Returns as PUT.
CLEAR = f"""{_COUNTED}
local header = redis.call('GET', KEYS[1])
if header ~= ARGV[1] then return {{0, header}} end
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], due)
redis.call('UNLINK', counts)
if ARGV[3] ~= '' then redis.call('HSET', counts, 'due', 0, 'order', ARGV[3]) end
expected[4] = nil
counted()
redis.call('SET', KEYS[1], ARGV[2])
return {{1}}
"""

# KEYS: header, rows, touched, deleted; the same of the rebuilt rows and of the former ones; then
# the columns of the three, their counts, and their due sets. ARGV: expected header, new header,
# header of the rebuilt rows, header of the former ones. Returns as PUT; -2 means that the rebuilt
# rows have another header, -3 that a part of the exchange is missing. Checks everything first,
# because a script's writes are not undone.
EXCHANGE = """
local header = redis.call('GET', KEYS[1])
if header ~= ARGV[1] then return {0, header} end
if redis.call('GET', KEYS[5]) ~= ARGV[3] then return {-2} end
local columns = redis.call('GET', KEYS[13])
if not columns or redis.call('HGET', KEYS[17], 'rows') ~= tostring(redis.call('HLEN', KEYS[6])) then return {-3} end
local orders = {redis.call('HGET', KEYS[16], 'order'), redis.call('HGET', KEYS[17], 'order')}
redis.call('UNLINK', KEYS[10], KEYS[11], KEYS[12], KEYS[21])
for _, names in ipairs({{2, 6, 10}, {3, 7, 11}, {4, 8, 12}, {19, 20, 21}}) do
  local now, rebuilt, former = KEYS[names[1]], KEYS[names[2]], KEYS[names[3]]
  if redis.call('EXISTS', now) == 1 then redis.call('RENAME', now, former) end
  if redis.call('EXISTS', rebuilt) == 1 then redis.call('RENAME', rebuilt, now) end
end
redis.call('SET', KEYS[9], ARGV[4])
redis.call('SET', KEYS[15], columns)
redis.call('UNLINK', KEYS[5], KEYS[14], KEYS[17])
for _, part in ipairs({{16, 2, 19, orders[2]}, {18, 10, 21, orders[1]}}) do
  local counts, rows, due, order = KEYS[part[1]], part[2], KEYS[part[3]], part[4]
  local touched = redis.call('LLEN', KEYS[rows + 1])
  redis.call('UNLINK', counts)
  redis.call('HSET', counts, 'rows', redis.call('HLEN', KEYS[rows]), 'touched', touched)
  if order then redis.call('HSET', counts, 'due', redis.call('ZCARD', due), 'order', order) end
end
redis.call('SET', KEYS[1], ARGV[2])
return {1}
"""

# KEYS: header, columns, rows, touched, count. ARGV: header for a new state, columns, the column of
# the order ("" for none). Returns the header and the columns that are stored afterwards; nothing
# when there are rows but no header.
CREATE = """
if redis.call('EXISTS', KEYS[1]) == 0 then
  if redis.call('EXISTS', KEYS[3]) == 1 then return {} end
  redis.call('SET', KEYS[2], ARGV[2])
  redis.call('HSET', KEYS[5], 'rows', 0, 'touched', redis.call('LLEN', KEYS[4]))
  if ARGV[3] ~= '' then redis.call('HSET', KEYS[5], 'due', 0, 'order', ARGV[3]) end
  redis.call('SET', KEYS[1], ARGV[1])
end
return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]) or ''}
"""

# KEYS: header, rows, touched, due, count. Returns as PUT.
COUNT = f"""{_COUNTED}
return lost or {{1}}
"""

# KEYS: due. ARGV: the lowest and the highest number (both included), how many names to return; then
# the names and numbers of the page before, the last one first. Returns names and numbers in turn.
# The page begins after the first of these names that still has its number, because other tasks may
# have removed or moved the others. If there is none, it begins again with the number of the last
# name.
DUE = """
local lowest = ARGV[5] or ARGV[1]
local first = nil
for i = 4, #ARGV, 2 do
  local number = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if number and tonumber(number) == tonumber(ARGV[i + 1]) then
    first = redis.call('ZRANK', KEYS[1], ARGV[i]) + 1
    break
  end
end
first = first or redis.call('ZCOUNT', KEYS[1], '-inf', '(' .. lowest)
local found, kept = redis.call('ZRANGE', KEYS[1], first, first + ARGV[3] - 1, 'WITHSCORES'), {}
for i = 1, #found, 2 do
  if tonumber(found[i + 1]) > tonumber(ARGV[2]) then break end
  kept[i], kept[i + 1] = found[i], found[i + 1]
end
return kept
"""

# KEYS: a scratch key. Runs the commands of the other scripts, to check the user's permissions.
PROBE = """
redis.call('HSET', KEYS[1], 'a', 'b')
redis.call('HMGET', KEYS[1], 'a')
redis.call('HGET', KEYS[1], 'a')
redis.call('HDEL', KEYS[1], 'a')
redis.call('RPUSH', KEYS[1], 'a')
redis.call('UNLINK', KEYS[1])
redis.call('SADD', KEYS[1], 'a')
redis.call('SREM', KEYS[1], 'a')
return {1}
"""

# The same, for rows with an order.
PROBE_ORDER = """
redis.call('ZADD', KEYS[1], 1, 'a')
redis.call('ZCARD', KEYS[1])
redis.call('ZSCORE', KEYS[1], 'a')
redis.call('ZRANK', KEYS[1], 'a')
redis.call('ZREM', KEYS[1], 'a')
return {1}
"""

SHA = {
    source: hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    for source in (PUT, RAISE, PURGE, CLEAR, EXCHANGE, CREATE, COUNT, DUE, PROBE, PROBE_ORDER)
}
