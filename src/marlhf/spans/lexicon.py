"""What English words are, one letter a kind, as far as a list and an ending can tell.

D determiner, N noun, I pronoun, Q number, J adjective, R adverb, V verb (base or present), K verb
in -ed or -en (past or participle), G verb in -ing, M auxiliary, X not, T to, P preposition, C and
or or, S conjunction, W who, which, what, U interjection, O 's of possession, B noun or verb alike,
L adjective or verb alike. The open classes hold common words whose ending does not tell; all else
is a noun.
"""

from __future__ import annotations

_CLOSED = {
    "D": "the a an this these those my your his its our their every each some any no another "
    "both all either neither several many few most such enough half certain various ur",
    "I": "i you he she it we they me him us them myself yourself himself herself itself "
    "ourselves themselves mine yours hers ours theirs someone somebody something anyone "
    "anybody anything everyone everybody everything nobody nothing one there u ya y'all "
    "others",
    "M": "am is are was were be been being 'm 're 've 'll 'd will would can could may might must "
    "shall should do does did has have had having ca wo ai gonna wanna gotta ought cannot "
    "im ive id dont didnt doesnt cant wont isnt wasnt arent couldnt wouldnt shouldnt havent "
    "hasnt theres thats",
    "X": "not n't n\u2019t never",
    "T": "to",
    "P": "of in for with on at from by about into through during against between among without "
    "within along across behind beyond near upon under over above below toward towards "
    "throughout despite including regarding per via onto inside outside around until till "
    "as like than besides except beside amid unlike versus vs vs. plus",
    "C": "and or but nor & plus",
    "S": "if because although though while whereas unless whether since so before after once "
    "lest 'cause cuz cause bc",
    "W": "who whom whose which what when where why how whatever whoever whichever wherever "
    "whenever however",
    "U": "yes yeah no hi hello hey oh ok okay please thanks sure well wow lol haha hmm um uh "
    "sorry welcome",
    "R": "very too also just only even really quite rather almost always often sometimes usually "
    "ever again still yet already now then here soon perhaps maybe instead else otherwise "
    "away back up down out off together however therefore thus ago later far further once "
    "twice alone abroad ahead apart aside forward indeed anyway meanwhile today tomorrow "
    "yesterday tonight somewhere anywhere everywhere e.g. i.e. etc. etc especially "
    "particularly",
    "Q": "two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty "
    "sixty hundred thousand million billion dozen",
}
CLOSED = {word: tag for tag, words in reversed(list(_CLOSED.items())) for word in words.split()}

_OPEN = {
    "V": "accept accomplish achieve acknowledge add adds adjust admit affect afford agree allow "
    "allows analyze annoy appear appears apply appreciate approve argue arise arrive ask asks "
    "assemble assess assist assume assure attend attract avoid avoids bathe become becomes "
    "begin begins behave believe believes borrow bother bothers breathe bring brings browse "
    "build buy cancel cancels cares carry celebrate cheat chew choose climb closes collect "
    "combine come comes commit communicate compete compliment confirm confront connect "
    "consider construct consult consume contain contains continue continues contribute "
    "convince cook cope covers create creates cut decide decides decorate deliver demonstrate "
    "deny depend depends describe describes deserve deserves destroy detect determine develop "
    "die dies differ dig disagree disclose discover discuss dislike donate draw dries earn "
    "eat eats elaborate eliminate enable encourage enforce engage enhance enjoy enjoys ensure "
    "enter entertain establish evaluate evolve examine exist exists expand expect expects "
    "explain explains explore express extend fail fails feel feels fill find finds finish "
    "fits fix flip flirt fly follow follows forget forgive gather generate get gets give "
    "gives go goes grab grow guess handle hang happen happens hate hates hear helps hesitate "
    "hide hire hits hold holds hope hurt hurts ignore imagine implement improve include "
    "includes indicate initiate initiates inspect install intend interact interpret introduce "
    "invest investigate involve involves isolate join keep keeps kill know knows lay leads "
    "learn learns leave let lets likes listen live locate look lose loves maintain make makes "
    "manage marinate marry mean means meet melt mention mentions miss misses mitigate move "
    "navigate need obtain occur occurs operate overcome owe owns pays perform pick pose pour "
    "predict prefer prepare preserve pretend prevent proceed produces promote propose protect "
    "prove provide provides pull pulls pursue put puts quit quits reach reaches react read "
    "reads receive recommend reconnect recover reduce reduces refer refers reflect refuse "
    "relate relax releases relieve rely remain remains remember remind reminds remove renew "
    "repeat replace represent represents reproduce require requires resist resolve respond "
    "reveal ruin satisfy save say says scare scramble see seek seem seems sees sell sells "
    "send sends serve serves settle share shed shoot shut shuts sit sits slice smells sneak "
    "soak solve sounds speak spend spends spoil stands start starts stay stays steal stir "
    "stop stops strengthen strive succeed suffer suggest suggests supports suppose survive "
    "suspect take takes talk teach tell tells tend tends thank think thinks tries try turns "
    "understand varies vary wait want wants wear wears weigh wish wonder worry write yell",
    "K": "ate beaten became began begun born bought bred broke broken brought built came cast "
    "caught chose chosen dealt died done drank drawn driven drove eaten fallen fed fell felt "
    "forgot forgotten fought found gave given gone got gotten grew grown heard held hidden "
    "hit hung kept knew known laid led left lied lost made meant met paid ran rid said sat "
    "saw seen sent shown slept sold spent split spoke spoken stole stolen stood struck stuck "
    "taken taught thought threw thrown tied told took understood used went withdrawn woke won "
    "wore written wrote",
    "G": "breathing calling cancelling controlling dealing doing dying falling feeling going "
    "handling installing killing lying pulling revealing rolling selling soothing stealing "
    "struggling swelling telling traveling travelling using yelling",
    "J": "able absolute abstract accurate actual additional adequate advanced adverse affectionate "
    "afraid african agricultural alert alive amazing american ancient angry annoyed annoying "
    "annual anti antioxidant appealing appropriate armed artificial ashamed asian asleep "
    "auditory authoritarian average awake aware awesome awful awkward bad balanced behavioral "
    "beneficial bent best better bi big bigger biggest bitter black blind blonde blue bold "
    "bored boring bottled brave brief bright broad brown busy canadian cardiovascular casual "
    "central challenging cheap cheaper chinese chubby civil civilian clear close closer "
    "closest coastal cold colored commercial common compassionate complex complicated "
    "concerned confident conflicted confused consistent constant controversial convenient "
    "conventional conversational cool corporate correct crazy creamy creepy criminal "
    "crippling crucial crude crunchy cultural current cute daily dark dead deadly dear decent "
    "deep deeper delicate dense dental dependent depressed desperate detailed diced different "
    "difficult digital direct dirty disabled disappointed disgusting distant distinct "
    "disturbing diverse dominant double drunk dumb earliest early easier easiest eastern easy "
    "educational efficient embarrassed embarrassing emotional empty entire environmental "
    "equal essential european exact excellent excess excited exciting explicit extended "
    "external extra extreme fair fake false familiar fancy fascinating fashioned fat favorite "
    "federal female fewer fictional fifth final financial fine firm first flat fluffy "
    "fluorescent foreign formal former fortified fourth fragile free french frequent fresh "
    "friendly frozen frustrated frustrating full fundamental funny general gentle genuine "
    "german giant glad global golden good grand great greater greatest greek green gross "
    "guilty gummy happier happy hard harder hardest hawaiian healthier healthy heartbroken "
    "hearty heated heavier heavy high higher highest homemade honest hostile hot hottest huge "
    "human humid hungry hydrated ideal ill illegal immature immediate immune important "
    "impressed inappropriate independent indian indie indirect individual indoor industrial "
    "infinite inflammatory influential informal informed initial inner innocent insane "
    "insecure instant intellectual intelligent intense interested interesting internal "
    "international interpersonal intimate introverted italian japanese joint junior korean "
    "large larger largest last late latest latter lazy leafy least legal legitimate less "
    "lesser licensed lighter likely limited little lively local lonely long longest loose "
    "loud lovely low lower lucky mad main major mashed maximum medieval medium mental messy "
    "mexican mid mild minimal minimum minor mistaken mixed mobile moderate modern moist "
    "monthly moral multi multiple mushy mutual naive nasty natural neat nerdy net new next "
    "nice non normal northern nuclear numb nutritional occasional odd official old older "
    "oldest ongoing online opposite optimal optional oral organized original other outdoor "
    "outer outgoing overall overweight overwhelmed overwhelming own paranoid particular "
    "passionate past perfect permanent persistent personal personalized petty pink plain "
    "pleasant polite poor popular potential powdered pre precise pregnant prime private pro "
    "professional prominent prone proper proud pure purple qualified quick quiet racial "
    "random rapid rare raw ready real recent red refined regional regular relaxed relevant "
    "renowned rental reserved residential resistant retail rewarding rich right risky roasted "
    "rocky rough rude rural russian sacred sad safe safer safest same satisfied scared scary "
    "seasonal second secret secure semi senior sensory severe sharp shiny short shorter shy "
    "sick significant silent silly similar simple simplest single sized sleepy slight small "
    "smaller smart smarter smooth sober social soft softer solar solid sour southern "
    "sovereign special specialized spicy spiritual square stable stained stale standard "
    "sticky straight strange strict strong stronger stupid substantial subtle sudden "
    "sufficient superior surprised surprising sweet talented tall taller tasty teenage tender "
    "terrified terrifying thick thin third thriving tight tiny tired torn total tough "
    "traditional transparent tricky triple true ugly ukrainian unable unauthorized uncertain "
    "uneasy unemployed uneven unexpected unhappy unhealthy uniform unique unlikely unpaid "
    "unpleasant unprofessional unsafe unsalted unsure unusual unwanted upbeat upcoming upper "
    "upset upsetting urban usual vague valid varied vegetarian verbal versatile viable "
    "vietnamese violent virtual visual vocal warm waterproof wealthy weekly weird western wet "
    "white whole wide wider widespread willing wise wooden worried worse worst worth wrong "
    "yellow young younger",
    "R": "altogether anymore anytime anyways awhile beforehand earlier elsewhere everyday farther "
    "faster fastest forever forth furthermore kinda longer more much nearby nonetheless "
    "nowhere outdoors outright overnight overseas pretty prior regardless somehow someplace "
    "somewhat sooner super underground upstairs worldwide",
    "B": "abuse access act acts address addresses advance advise aid angle answer appeal approach "
    "approaches arrange arrest assault associate attack attempt attempts bait bake balance "
    "bear bears beat beats benefit bet bid bite blame blend block blow boil boost brainstorm "
    "break breaks breeds brew brush bug bugs burn call calls care catch causes challenge "
    "change charge chase chat check checks cheer chews chop claim claims clash click clip "
    "coach coat comfort command comment communicates compare compromise conduct contact "
    "contacts control cooks copy cost costs count cover crack craft crash crawl creep cross "
    "cry cure cuts damage dance date deal debate decline decrease default defeat defend "
    "demand deposit design desire dip discomfort display displays divorce doubt download "
    "draft drag drain dress dresses drill drink drinks drive drives drop drops dumps dye ease "
    "edit effect encounter encounters end ends escape estimate estimates exchange excuse "
    "exercise exit experience experiment extract face fall falls fare favor fear features "
    "feed fight figure figures file filter fit flag flakes flow focus fool force form format "
    "foster freeze fry function fund gain gains glow glue graduate grease grind grounds "
    "guarantee guide guides hangout harm harvest heads heal heat help hike hint honor hook "
    "hopes host hug hunt increase increases influence inhale insult invite jam judge jump "
    "kick label laugh laughs layer lead leak leaves lie lies limit limits lists lives log "
    "looks loop love markets marks mash master match matches matter matters mature measure "
    "mess message microwave mind minds mix mixes model monitor mount moves nap needs nest "
    "note notes notice offer offers orbit outline pace pack paint pair pass passes paste pay "
    "pinch place plan plant play plays plug points post practice praise preheat present "
    "presents press print produce progress promise promises protest prune pump punch purchase "
    "puree push puzzle quotes raise raises record recycle refund regards register regret "
    "relay release rent repair reply report reports request respect respects rest restart "
    "result return returns reuse reverse review reward ride rinse rise roast roll rolls rub "
    "run runs sabotage scares scoop scores seal search searches season select set sets shake "
    "shave shift shine ship shock shop show shower shows sight sign signals simmer sing sleep "
    "slip smell smile smoke smokes soothe sound spam span speed spice spot spray spread "
    "sprinkle stain stall stamp stand stick store strain stream stresses stretch stroke "
    "struggle struggles study substitute sue suit supplement support surprise sweat swim "
    "swirl switch tag talks tap target taste tastes text texts throw tip tone touch trace "
    "track tracks train trains transfer transition translate travel treat treats trick "
    "trigger trust turn update upload use uses value vent view visit volunteer wake walk "
    "walks wash waste watch watches whisk win wipe wipes wishes witnesses wonders work works "
    "worship wrap yield",
    "L": "alternate calm clean complete dry fast narrow open perceive reconcile separate slow "
    "spare trim",
    "N": "acrylic advertising alternative anniversary atlantic baking beginning boarding boundary "
    "building bullying camping chemical climbing clinic coating coloring coughing crossing "
    "cruise detective drawing dressing engineering english evening expertise fabric family "
    "farming february feeding fishing flavoring franchise frosting frying functioning gaming "
    "gardening garlic graphic greeting heating hiking housing hunting italy january landing "
    "library lightning lining magic marketing mechanic mechanical morning music networking "
    "nursing olympic operating pacific painting panic parenting parking perspective planting "
    "plastic plumbing polish processing programming proprietary rating reasoning recording "
    "representative republic rosemary salary seasoning shaving shipping shopping smoking "
    "speeding spring streaming stretching string stuffing suffering summary supply swimming "
    "tanning teaching testing thanksgiving timing topic traffic training turmeric "
    "understanding united vegetable voting warning washing watering wedding wellbeing",
    "U": "ah alright bye ha hm huh ooh",
}
_WORDS = {word: tag for tag, words in _OPEN.items() for word in words.split()} | CLOSED


_ENDINGS = (
    ("J", "able ible ful less ous ish ive ical ic ary"),
    ("R", "ly wards wise"),
    ("N", "tion sion ment ness ity ship ism ist ance ence ency ancy hood dom ology ling thing"),
    ("G", "ing"),
    ("K", "ed"),
    ("V", "ize ise ify"),
)
_BY_ENDING = {ending: tag for tag, endings in _ENDINGS for ending in endings.split()}
_ENDING_SIZES = sorted({len(ending) for ending in _BY_ENDING}, reverse=True)


def kind(word: str, written: str) -> str:
    """The kind of a word in lower case, before its neighbours are asked; `,` and `.` for marks."""
    if tag := _WORDS.get(word):
        return "N" if written[0].isupper() and tag in "BVJL" and len(written) > 1 else tag
    if word[0].isalpha():
        return "N" if written[0].isupper() else by_suffix(word)
    if word[0].isdigit() or (word[0] in "$#\u00a3\u20ac" and len(word) > 1):
        return "Q"
    return "." if word[0] in ".!?\u2026" else ","


def by_suffix(word: str) -> str:
    """What the ending of a word in lower case says; a noun where it says nothing."""
    for size in _ENDING_SIZES:
        if len(word) > size + 2 and (tag := _BY_ENDING.get(word[-size:])):
            return tag
    return "N"
