-- Permits: how many requests each gateway may have in flight out of a total that all share. One gateway settles several pools
-- in one call; each pool is decided and written in one step, so the permits held never add up to more than the total.
--
-- KEYS  1 :events            pubsub
--       2.. :permits:{name}  hash  gateway -> entry "held want served_ms expires_ms number spare"; and SETTLING -> ms
-- ARGV  1 JSON: gateway; number (of this call; an older one that arrives late is ignored); ttl_ms of an entry; settle_ms;
--         tenure_ms; spare (1: it takes a part of what nobody wants); leave (true: it gives back all); dead: a gateway that
--         is known to be no more, or "";
--         pools: for each key after the first {name, total, keep, want, held}
--           keep: it goes on with at least so many whatever the answer; want: what it could use; held: what it had
-- Returns JSON, for each pool {held, target, needed}, or {stale: true}.
--   target: its fair share; needed: another gateway waits for its own, so what is held over the target should come back.
--
-- Shares are max-min fair by what each wants; what nobody wants is split evenly, so that a request need not wait for a
-- permit where there is no contention. What cannot be split goes to who has had nothing for the longest, after a tenure.

local EVENTS, SETTLING = KEYS[1], '~settling'
local args = cjson.decode(ARGV[1])
local me, number = args.gateway, args.number
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- The entries of a pool that have not expired, by gateway; and until when it settles.
local function read(key)
  local flat, entries, settling = redis.call('HGETALL', key), {}, 0
  for i = 1, #flat, 2 do
    if flat[i] == SETTLING then
      settling = tonumber(flat[i + 1])
    else
      local held, want, served, expires, n, spare = flat[i + 1]:match('(%d+) (%d+) (%d+) (%d+) (%d+) (%d)')
      if tonumber(expires) > now then
        entries[flat[i]] = {
          id = flat[i], held = tonumber(held), want = tonumber(want), served = tonumber(served),
          number = tonumber(n), spare = spare == '1',
        }
      else
        redis.call('HDEL', key, flat[i])
      end
    end
  end
  return entries, settling
end

-- Who gets what cannot be split: those in their tenure, the latest first, so that it stays where it just went; then whoever
-- was served longest ago.
local function before(a, b)
  local x, y = now - a.served < args.tenure_ms, now - b.served < args.tenure_ms
  if x ~= y then return x end
  if a.served ~= b.served then return (a.served > b.served) == x end
  return a.id < b.id
end

local function split(amount, among)
  table.sort(among, before)
  local each, rest = math.floor(amount / #among), amount % #among
  for i, entry in ipairs(among) do entry.share = entry.share + each + (i <= rest and 1 or 0) end
end

-- Sets the share of every entry.
local function shares(entries, total)
  local by_want, left = {}, total
  for _, entry in pairs(entries) do
    entry.share = 0
    by_want[#by_want + 1] = entry
  end
  table.sort(by_want, function(a, b) return a.want < b.want or (a.want == b.want and a.id < b.id) end)
  for i, entry in ipairs(by_want) do
    if entry.want > math.floor(left / (#by_want - i + 1)) then
      split(left, { unpack(by_want, i) })
      return
    end
    entry.share = entry.want
    left = left - entry.want
  end
  local spare = {}
  for _, entry in ipairs(by_want) do
    if entry.spare then spare[#spare + 1] = entry end
  end
  if #spare > 0 then split(left, spare) end
end

local function starving(entry)
  return entry.held < math.min(entry.want, entry.share)
end

local function others_starve(entries)
  for id, entry in pairs(entries) do
    if id ~= me and starving(entry) then return true end
  end
  return false
end

local function settle(key, pool)
  local entries, settling = read(key)
  if entries[args.dead] then
    entries[args.dead] = nil
    redis.call('HDEL', key, args.dead)
  end
  local known = entries[me]
  if known and number < known.number then return { stale = true } end
  local had = known and known.held or 0
  if not known and pool.held > 0 then
    -- This store has forgotten, so it does not know of the others either: nobody's part grows until all have spoken.
    settling = now + args.settle_ms
    redis.call('HSET', key, SETTLING, settling)
  end
  local mine = known or { id = me, served = 0 }
  mine.want, mine.spare, mine.held, mine.number = math.min(pool.want, pool.total), args.spare == 1, 0, number
  entries[me] = mine
  local others = 0
  for id, entry in pairs(entries) do
    entry.want = math.min(entry.want, pool.total)
    if id ~= me then others = others + entry.held end
  end
  shares(entries, pool.total)
  local free = math.max(0, pool.total - others)
  local possible = math.min(mine.share, free)
  if possible < mine.want and not others_starve(entries) then
    -- Somebody's share of what cannot be split lies about: better used than fair.
    possible = math.min(mine.want, free)
  end
  if settling > now then possible = math.min(possible, pool.held) end
  mine.held = math.max(pool.keep, possible)
  if mine.held > had then mine.served = now end
  if args.leave then
    mine.held, entries[me] = 0, nil
    redis.call('HDEL', key, me)
    shares(entries, pool.total)
  else
    redis.call('HSET', key, me, string.format('%d %d %d %d %d %d', mine.held, mine.want, mine.served, now + args.ttl_ms,
      number, args.spare))
    redis.call('PEXPIRE', key, args.ttl_ms * 2)
  end
  local needed = others_starve(entries)
  local newcomer = not known and others > 0
  if (entries[me] and starving(mine)) or (mine.held < had and needed) or newcomer then
    redis.call('PUBLISH', EVENTS, cjson.encode({ permits = pool.name }))
  end
  return { held = mine.held, target = mine.share, needed = needed }
end

local answers = {}
for i, pool in ipairs(args.pools) do answers[i] = settle(KEYS[i + 1], pool) end
return cjson.encode(answers)
